"""Training of the language models: `python -m train`."""
