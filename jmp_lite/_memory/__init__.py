"""Less memory: master weights, optimizer state in half, stochastic rounding."""
