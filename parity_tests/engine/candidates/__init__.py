"""How each framework's model is loaded, called and run in float64."""
