"""Arms: the ways to train one model that are compared. A file imports only files before it.

`loss_scalers`: the loss scales of jmp_lite, of its peers, and none.
`memory_arms`: the ways to hold parameters and moments in fewer bytes.
`jax_arms`: a training step of a model in JAX, in one precision.
`torch_models`: the models of `examples.models` in PyTorch.
`torch_arms`: a training step of such a model in PyTorch.
`worker`: runs one arm in a process of its own.
"""
