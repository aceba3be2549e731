"""Measures how much accuracy each module loses in half precision.

Read `fewest` (the search), `report`, then `compare`.
"""
