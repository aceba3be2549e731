"""The plan of autocast: what runs in half, decided before anything is computed.

docs/how-autocast-works.md has the idea in about 180 lines. Here it is with its options and guarantees. In the
order in which to read the files:

- What the user asks for: `rules` (the options), `scopes` (the parts of a program that stay as they are).
- What a jaxpr is: `op` (an operation, read once), `softmaxes` (operations that run as one function), `loops`
  and `dependence` (what computes a weight's gradient, and by what a loop decides).
- What is known of values: `states`, then `ruling` and `half_sums` (what the options ask of each operation),
  `wanted`, `regions` (other operations that run as one function, if their result is wanted in half),
  `operands` (how an operation wants its operands) and `demand` (which values are wanted in half).
- What is decided: `plan` (the parts of a plan, plain data), `elementwise`, `products` and `decide` (one
  operation).

`passes` then improve the plan, each in a file of its own. `_autocast/planner.py` runs all of it.
"""
