"""The command that compares all models, and the code that prints and writes its measurements."""
