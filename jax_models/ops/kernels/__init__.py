"""Kernels for TPUs and GPUs, and calls of cuDNN and of twinscan-native."""
