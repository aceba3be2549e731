"""Measures how much accuracy each module loses in half precision.

Read `fewest` (the search for modules to keep in float32), `report`, then `compare`.
"""
