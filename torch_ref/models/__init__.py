"""The language models, one architecture a file."""
