"""Proof that every JAX layer equals its PyTorch twin: `python -m parity_tests` is the report."""
