"""Compares the results of both sides: errors, faults, notes, and the report of them."""
