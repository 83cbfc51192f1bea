"""The layers, one architecture a file."""
