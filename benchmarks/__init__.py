"""Benchmarks of jmp_lite. Nothing in `jmp_lite` imports them. Read the rooms in this order:

`device.py`: the device and the versions to which figures belong.
`command.py`: the parser and the file of results of a command.
`arms/`: the ways to train one model that are compared, in JAX and in PyTorch. The other rooms use them.
`ported/`: public programs in float16: the changed lines, and a tiny run of each. The programs are not here.
`compiled/`: what a program does. A step is compiled for an H100 that need not be there; nothing is run.
`timed/`: how fast a step runs and how well a model learns. The steps are run.
`gpu/`: all of it on a rented GPU, in one command.
`results/`: what the commands wrote. The README's tables are made from these files.
`tests/`: has the same rooms.
"""
