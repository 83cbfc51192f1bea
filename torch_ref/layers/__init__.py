"""The layers, one architecture per file."""
