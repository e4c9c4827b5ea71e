"""How a model lies on GPUs, what fits, and how fast it is there."""
