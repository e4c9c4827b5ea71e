"""Foreign names, directions and config files. Nothing outside this package knows them."""
