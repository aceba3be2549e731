"""Measures how much accuracy each module loses in half precision.

Read `modules` (the parts of a program that are in half), `origins` (what a value comes from), `needs`
(which edits need others), `sources` (the casts, layers and arguments that half values come from), `flags`
(the program with a flag for each of them), `report`, `groups` (the outputs that are compared together or
alone), `written` (the program with edits in its source), `states` (what a step computes after some steps),
`runs` (the errors with some modules in float32), `judge` (which errors are harmful), `fewest` (the search
for modules to keep in float32), `remedies` (what to write), then `compare`.
"""
