"""Load, call and run the model of each framework, also in float64."""
