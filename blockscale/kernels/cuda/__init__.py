"""Kernels in CUDA C++, compiled when first used, and one launcher for each family of them."""
