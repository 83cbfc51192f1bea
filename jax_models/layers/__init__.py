"""The layers: NNX modules that call `ops`, one architecture per file, with their weight tables."""
