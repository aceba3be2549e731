"""Loss scaling: the scales, the finite check, true gradients, and the optax transforms.

In the order in which to read the files:

- What they stand on: `finite` (the check), `norm` (global norms), `serialization` (with Flax), `scalars`
  (numbers that a user gives).
- The scale and the gradients: `loss_scale`, `grad` (true gradients), `layer` (a scale for one layer).
- The optimizer: `order` (what may not be outside), `state`, `stuck` (runs that learn nothing), `skipping`,
  `optimizer` (the transforms), `accumulation` (of micro-batches), `migrate` (an old state, other settings).
"""
