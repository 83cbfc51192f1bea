"""Converts recurrent layers of other frameworks, with their weights, to layers of this package."""
