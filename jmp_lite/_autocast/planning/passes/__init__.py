"""The passes over a plan: each is a function from plan to plan, in a file of its own.

A decision says in which dtype an operation runs, by what its operands are and what its readers want. The
passes add what no operation can decide alone. `PASSES` in `_autocast/planner.py` lists them in the order in
which they run: `recompute`, `pairs`, `checkpoints`, `precision`. docs/how-autocast-works.md says
what each one guarantees, with the numbers that it changes.
"""
