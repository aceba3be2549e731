"""Steps that are run: their times, and what a model learns. A file imports only files before it.

`flops`: how many operations a step needs.
`session`: compiles and times arms, which take turns.
`run`: runs a session for one model.
`table`: draws the tables and the chart of what `run` measured.
`spread`: says whether an arm learns as float32 does.
`convergence`: trains three models in four precisions.
`fitted`: the error of the gradient from the start of training to its end.
`float8`: trains a GPT in float32, bfloat16 and fp8.
`memory`: trains two models whose parameters and moments rest in fewer bytes.
`diagnosis`: what each diagnosis of GPT-2 small costs on this machine.
`interleaved`: the CPU time of steps that take turns.
`optimizer_step`: what a loss scale costs an optimizer step on a CPU.
`half_on_cpu`: what bfloat16 gains in a training step on a CPU.
"""
