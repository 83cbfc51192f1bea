"""Kernels of TPUs and GPUs, and cuDNN, each behind one call."""
