"""Kernels for TPUs and GPUs, and calls of cuDNN."""
