"""The machine: how a jaxpr is traced, read and run again.

autocast, the tap of the diagnostics and the products of the Flax layers stand on it. In the order in which
to read it: `primitives` (the table of operations, one row each), `read` (how to read an equation),
`precision` (the precisions of products), `inner` (the jaxprs inside an equation), `bind` (how to repeat it),
`arguments` (how a call of a user's function becomes a jaxpr), `replay` (how a jaxpr runs again, with an
action for each equation), `calls` (operations that run jaxprs, such as loops), `products` (products whose
gradients have dtypes of their own).
"""
