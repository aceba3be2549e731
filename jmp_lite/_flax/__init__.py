"""What `linen` and `nnx` share. Read `products`, `layers`, then `calls`.

`layers` tells the kinds of modules apart. `calls` runs one call of one module. `linen` and `nnx` only find
the modules of a model and read their parameters.
"""
