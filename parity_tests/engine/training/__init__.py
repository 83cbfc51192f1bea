"""Compare training: both sides take the same optimizer steps."""
