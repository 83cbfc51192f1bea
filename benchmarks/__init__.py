"""How fast, how exact and how large: measured side by side with peers."""
