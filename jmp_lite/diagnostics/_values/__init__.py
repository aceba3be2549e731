"""Measures values inside a program: runs a jaxpr again, and records a small array at each value.

Read `sites` (the values of a program), `describe` (finds them before it runs), `tap` (runs it and measures),
`trace` (makes the program of a loss function or step, and finds its state), `source` (the expressions of the
user's files), `edited` (runs functions with edits in their source), `layers` (runs layers with another
dtype), `numbers` (those that half precision rounds away), `reference` (runs a program with its half values in
float32), `sums` (those of gradients), `rules` (which rules of derivatives make half values by themselves),
then `case` (the call, traced once).
"""
