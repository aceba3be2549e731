"""autocast: mixed precision for any JAX function, by rewriting its jaxpr.

In the order in which to read it: `planning` (which decides about every operation), `value` and `interpreter`
(which carries a plan out), `traced_rule` and `custom_rules` (custom derivatives), `calls` (jit, loops),
`keep` (what keeps a part in float32), `api` (`autocast`), `report` (what users are told).
"""
