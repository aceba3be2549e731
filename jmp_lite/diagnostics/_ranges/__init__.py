"""Counts how many values half precision loses, and suggests a loss scale.

Read `magnitudes` (the measurement), `scales` (what each loss scale loses), `picture`, `report`, `float8` (the
operands of matmuls in fp8), then `profile`.
"""
