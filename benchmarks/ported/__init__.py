"""Public programs in float16. Their text is not here: a port is a list of substitutions for a clone.

Read the files in this order:

`port`: a port as data; how it is applied to a clone, and how its lines are counted.
`record`: a train step that keeps what the page says of it.
`data`: data for tiny runs that every machine has.
`stand_ins`: stand-ins for modules that are not installed, and for names that JAX has removed.
`programs`: one file for each program: its port, and a driver that runs it at a tiny size.
`worker`: one run of one program, in a process of its own.
`page`: the table of docs/ported-programs.md, and the diffs of the next file.
`diffs`: the page of the diffs, which `page` writes.
`__main__`: the command.
`suite`: the command that runs another package's tests through us, and counts those that fail only then.
`through`: its pytest plugin.
"""
