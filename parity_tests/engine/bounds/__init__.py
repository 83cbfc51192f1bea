"""How large an error rounding explains."""
