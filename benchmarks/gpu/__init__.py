"""One command for a rented GPU, `python -m benchmarks.gpu`. A file imports only files before it.

`wheels`: the packages that a rented machine may lack.
`files`: the few files that travel between two machines.
`machine`: reports the machine, and checks that JAX computes on the GPU.
`compile_arm`: compiles one arm, and so fills the caches of compiled programs.
`turns`: times steps that take turns, by the clock.
`scale_time`: the time that a loss scale costs in the optimizer.
`float8_time`: the time of a block of a transformer under autocast to float8.
`attention_time`: the numbers and the time of `fuse_attention` for each kind of mask.
`profiles`: the measured times of kernels and modules.
`profile_arm`: one profile of a step, read by module.
`programs`: the programs of the GPU beside those that were compiled for an H100 that was not there.
`queue`: runs pieces of work, each in a process of its own, until a deadline.
`pieces`: the pieces, the most valuable first.
`__main__`: the command.
"""
