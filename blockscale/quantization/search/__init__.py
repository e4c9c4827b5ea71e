"""Mixed precision: which format each fused group gets under a budget of bits, bytes, divergence, latency or energy."""
