"""Products in fp8: the arithmetic, and which products of a plan run in it.

Read `quantize.py` first (a tensor and its scale), then `product.py` (a product and its gradients) and
`action.py`: which products run in fp8, and how the interpreter runs one. autocast loads the room when a user
asks for fp8.
"""
