"""Finds the operation at which a loss or its gradients become inf or NaN.

Read `extremes` (the measurement), `flow` (where inf and NaN begin), `hints` (well-known reasons), `report`,
`trials` (the remedies that are run), then `find`.
"""
