"""The ops as torch knows them, `torch.ops.blockscale.*`: traced by torch.compile, captured in CUDA graphs.

None of them waits for the device or looks at a value. They have no gradients: they serve models that run.
"""
