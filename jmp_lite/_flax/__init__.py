"""The parts that `linen` and `nnx` share. Read `products`, `layers`, then `calls`.

`layers` says what kind of module a module is. `calls` plans one call of one module and runs the plan.
`linen` and `nnx` only find the modules of a model and read their parameters.
"""
