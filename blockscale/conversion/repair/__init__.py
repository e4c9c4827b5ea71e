"""`lint --repair`: findings, remedies for them, and a new folder without them."""
