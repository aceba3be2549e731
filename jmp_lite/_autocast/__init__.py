"""autocast: mixed precision for any JAX function, by rewriting its jaxpr.

In the order in which to read it: `rules` (the lists of operations, as data), `jaxprs` (how to read and repeat
an equation), `scopes` (where autocast keeps out), `activations` (what is computed as one function), `states`
(what is known of a value, and what is decided), `demand` (what is wanted in half), `plan` (the decisions),
`interpreter` (which carries them out), `calls` and `custom_rules` (jit, loops, custom derivatives), `api`
(what users call) and `report` (what they are told).
"""
