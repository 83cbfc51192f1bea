"""Language models: their common base, one architecture per file, and generation."""
