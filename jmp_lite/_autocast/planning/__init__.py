"""The plan of autocast: what runs in half, decided before anything is computed.

In the order in which to read it: `rules` (the user's options), `scopes` (where autocast keeps out), `op` (an
operation, read once), `activations` (functions that run as one), `gradients` (which products make weight
gradients), `marks` (which values surely stay float32), `demand` (the backward pass: which values are wanted
in half), `states` (facts about a value), `plan` (what a plan consists of), `decide` (the decision about one
operation), `planner` (the forward pass, which puts the decisions together).
"""
