"""Predictions fitted to a user's own measurements."""
