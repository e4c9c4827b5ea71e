"""Kernels in Triton, for sm_80 and later. One file a kernel family: functions for the device and a plain launcher."""
