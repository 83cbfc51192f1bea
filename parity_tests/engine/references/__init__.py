"""The references for a candidate: a torch module, a JAX model, or a recorded file."""
