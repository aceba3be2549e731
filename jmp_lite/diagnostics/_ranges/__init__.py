"""Counts how many values half precision loses, and suggests a loss scale.

Read `magnitudes` (what is measured), `scales` (what each loss scale loses), `picture`, `report`, then
`profile`.
"""
