"""Flax modules under a policy.

In the order in which to read the files: `products` (layers whose gradients are summed in float32), `layers`
(the kinds of modules), `calls` (one call of one module), then `linen`, `objects` (NNX modules as arrays, for
autocast) and `nnx`, which only find the modules of a model and read their parameters.
"""
