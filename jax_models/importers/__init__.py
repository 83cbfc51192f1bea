"""Recurrent layers of other frameworks, with their weights, as layers of this package."""
