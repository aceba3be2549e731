"""Finds the operation at which a loss or its gradients become inf or NaN.

Read `flow` (where inf and NaN begin), `hints` (well-known reasons), `report`, then `find`, which also runs
the remedies.
"""
