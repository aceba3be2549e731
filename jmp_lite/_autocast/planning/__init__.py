"""The plan of autocast: what runs in half, decided before anything is computed.

In the order in which to read it: `rules` (the user's options), `scopes` (the scopes that it leaves as they
are), `predicates` (the values that decide when a loop ends), `op` (an operation, read once), `activations`
(functions that run as one), `gradients` (which products make weight gradients), `marks` (which values stay
float32 in any case), `demand` (the backward pass: which values are wanted in half), `states` (what is known
of a value), `plan` (the parts of a plan), `pairs` (the half values whose gradients go through float32),
`precision` (the precision of products in float32), `decide` (the decision about one operation), `planner`
(the forward pass, which puts the decisions together).
"""
