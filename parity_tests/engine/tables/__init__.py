"""Drafts of weight tables."""
