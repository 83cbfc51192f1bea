"""What the command prints, writes and draws of its measurements."""
