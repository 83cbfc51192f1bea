"""What a candidate is measured against: a torch module, a JAX model, or a recorded file."""
