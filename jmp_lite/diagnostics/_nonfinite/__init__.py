"""Finds the operation at which a loss or its gradients become inf or NaN.

Read `flow` (where inf and NaN begin), `hints` (well-known reasons), `report`, `trials` (the remedies that are
run), `find`, then `gradients` (those of a step that are all zero, or not scaled).
"""
