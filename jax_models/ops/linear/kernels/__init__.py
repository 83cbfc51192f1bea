"""Kernels for TPUs and GPUs."""
