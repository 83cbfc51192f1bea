"""Measures any pair of a torch module and its JAX port. It knows no architecture.

Start with `compare.py`.
"""
