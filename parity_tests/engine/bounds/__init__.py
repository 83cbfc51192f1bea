"""Decides how large an error rounding can explain."""
