"""The engine: requests batched continuously over a paged cache, one step at a time."""
