"""The language models, one architecture per file."""
