"""Less memory: master weights, optimizer state in half, stochastic rounding.

Read `rounding` (to half, at random), `wrapper` (what wrappers of optimizers share), `half_params` (parameters
in half without masters), `master_params` (with masters), then `cast_state` (optimizer state in half).
"""
