"""autocast: mixed precision for any JAX function, by rewriting its jaxpr.

docs/how-autocast-works.md has the idea in about 150 lines. In the order in which to read the room: `planning`
(which decides about every operation) and its `passes`, `planner` (which runs them), `value`, `regions` and
`interpreter` (which carries a plan out), `traced_rule` and `custom_rules` (custom derivatives), `calls` (jit,
loops), `keep` (what keeps a part in float32), `api` (`autocast`), `report` (what users are told).
"""
