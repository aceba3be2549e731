"""Products in fp8: the arithmetic, and the action that runs it in a plan of autocast.

Read `quantize.py` first (a tensor and its scale), then `product.py` (a product and its gradients) and
`action.py`: which products run in fp8, and the action `Float8`, which the planner of autocast puts into a
plan and the interpreter runs.
"""
