"""Decide how large an error rounding can explain."""
