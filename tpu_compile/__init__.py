"""Compiles for TPUs on a machine without a TPU."""
