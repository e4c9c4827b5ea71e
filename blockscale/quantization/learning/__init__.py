"""Codes, block scales and norm gains of a finished checkpoint, moved to bring the whole model closer to its source."""
