"""Finds the operation at which a loss or its gradients begin to be not finite.

Read `extremes` (the measurement), `flow` (where inf and NaN begin), `advice`, `report`, then `find`.
"""
