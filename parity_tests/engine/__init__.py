"""Compares any torch module with its JAX port. Nothing here depends on an architecture.

Start with `compare.py`.
"""
