"""Figures of compiled programs: bytes, kernels, memory, products. A file imports only files before it.

`h100`: compiles a step for an H100, or for many, on a machine without one.
`gpt`: the GPT-2 whose step is compiled, with half precision by four ways.
`loss_scale_cost`: what a loss scale costs, beside the peers.
`float32_results`: the cost and the accuracy of float32 logits of half operands.
`float8`: the estimated time of a block of a transformer in fp8.
`memory`: what master weights and optimizer state in half cost, for an H100.
`step`: what a whole GPT step does, on one device or on many.
`by_hand`: what the step of a transformer moves beside casts by hand.
`attention`: what cuDNN's attention changes in transformers, called by hand or by `fuse_attention`.
`labels`: what a loss with integer labels moves, beside one-hot labels.
`families`: what five more families of models move beside casts by hand.
`llama`: what crosses between the devices of a sharded LLaMA-like stack, by dtype.
`deep`: what a scanned, rematerialized stack of LLaMA's size keeps and moves at its true depth.
`half_stream`: the errors of gradients with a residual stream in float32, in half, and by hand.
`moe`: what a mixture of experts moves on eight devices.
`predict`: what the step of each model of `examples.models` does.
`largest_batch`: how large a batch fits into the memory.
`passes`: what each pass of autocast adds.
`pages`: writes the tables of the documentation from the files of results.
`pictures`: draws the pictures of the documentation.
"""
