"""What a model is: its matrices, caches and bytes, from a config, a folder or the hub."""
