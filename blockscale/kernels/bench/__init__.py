"""Times of kernels: weights read from memory and not from a cache, and the machine's own ceilings beside them."""
