"""Counts how many values half precision loses, and suggests a loss scale.

Read `magnitudes` (the measurement, and the loss scales that follow), then `profile`.
"""
