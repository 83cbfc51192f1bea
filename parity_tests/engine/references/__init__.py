"""The references that a candidate is measured against: a torch module, a JAX model, or a record."""
