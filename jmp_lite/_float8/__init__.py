"""Products in fp8: the arithmetic, and which products are large enough to gain.

Read `quantize.py` first (a tensor and its scale), then `product.py` (a product and its gradients) and
`selection.py` (which products run in fp8). The planner of autocast asks `selection`, and the interpreter runs
`product`; both are marked by `Run.float8` in a plan.
"""
