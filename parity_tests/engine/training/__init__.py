"""The same optimizer steps on both sides."""
