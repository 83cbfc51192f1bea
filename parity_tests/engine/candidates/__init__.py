"""Loads, calls and runs the model of each framework, also in float64."""
