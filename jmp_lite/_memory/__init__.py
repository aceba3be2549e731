"""Less memory: master weights, optimizer state in half, stochastic rounding.

Read `rounding` (to half, at random), `wrapper` (what wrappers of optimizers share), `half_params` (parameters
in half that learn), `placing` (an old array in the place of a new one), `master_params` (masters read and
written), then `half_state` (optimizer state in half).
"""
