"""What `linen` and `nnx` share: layers, and products with wide gradients."""
