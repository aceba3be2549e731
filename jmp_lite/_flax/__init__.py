"""Flax modules under a policy. `products`, `layers` and `calls` are what `linen` and `nnx` share.

`layers` tells the kinds of modules apart. `calls` runs one call of one module. `linen` and `nnx` only find
the modules of a model and read their parameters. `objects` splits NNX modules into arrays for autocast.
"""
