"""Builds the site: the pages of `docs/`, with what their code prints, and the API reference."""
