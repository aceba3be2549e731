"""Counts how many values half precision loses, and suggests a loss scale.

Read `magnitudes` (the measurement), `scales` (the loss scales that lose little), `report`, then `profile`.
"""
