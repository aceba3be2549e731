"""autocast: mixed precision for any JAX function, by rewriting its jaxpr.

In the order in which to read it: `primitives` (the table of operations, one row each), `rules` (the user's
options), `jaxprs` (how to read an equation), `binding` (how to repeat it), `scopes` (where autocast keeps
out), `states` (facts about a value), `activations` (functions that run as one), `plan` (what a plan consists
of), `decide` (the decision about one operation), `demand` (which values are wanted in half), `gradients`
(which products make weight gradients), `planner` (which puts the decisions together), `products` (products
whose gradients have dtypes of their own), `interpreter` (which carries the plan out), `custom_rules` and
`calls` (custom derivatives, jit, loops), `layers` (a loss scale for each layer), `arguments` (the arguments
of a call), `api` (the functions that users call), `advice` (why a product is in float32, and sizes for Tensor
Cores), `operations` and `report` (what users are told).
"""
