"""Kernels in C for the CPU, built with the system compiler when first used."""
