"""Attentions in a jaxpr, run by JAX's fused attention: a transform in front of `jax.grad` and of `autocast`.

In the order in which to read it: `facts` (what is known of each variable: how it depends on the scores),
`softmax` (a softmax between two products, found in a jaxpr), `find` (the attention that it is: its axes, its
mask or bias), `run` (how it runs instead), `api` (`fuse_attention`, and what `explain` tells of it).
"""
