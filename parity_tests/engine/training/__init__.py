"""Compares training: both sides take the same optimizer steps."""
