"""Measures how much accuracy each module loses in half precision.

Read `modules` (the parts of a program that are in half), `flags` (the program with a flag for each module),
`fewest` (the search for modules to keep in float32), `report`, then `compare`.
"""
