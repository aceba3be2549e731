"""Reads the program that XLA compiled, and estimates its time.

Read `hlo` (parses the text), `traffic` (the bytes of a kernel), `products` (matrix products and their
dtypes), `program` (the report), `read` (reads a program), `gpus` (data sheets and descriptions), `compile`
(compiles for a GPU that the machine does not have), then `roofline`.
"""
