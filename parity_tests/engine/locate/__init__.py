"""Finds where a JAX port first departs from its reference: call by call, forward and backward."""
