"""Compile for TPUs, on a machine that has none."""
