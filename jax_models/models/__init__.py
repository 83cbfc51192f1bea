"""Language models: the skeleton, an architecture a file, and generation."""
