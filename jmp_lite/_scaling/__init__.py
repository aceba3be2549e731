"""Loss scaling: the scales, the finite check, true gradients, and the optax transforms."""
