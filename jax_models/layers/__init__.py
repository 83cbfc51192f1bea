"""The layers: one architecture a file, NNX modules over `ops`, with their weight tables."""
