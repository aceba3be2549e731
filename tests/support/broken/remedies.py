"""Applies to a broken run what a report says that helps, as its user would write it."""

import dataclasses
import inspect
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np

from .run import Run

NAMES = re.compile(r"\b(?:HALF|BF16|F16|E4M3)\b")
"""The names of the half dtypes in the files of broken runs."""


def applied(run, trial):
    """The run with one change that a report says helps."""
    if trial.loss_scale is not None:
        run = dataclasses.replace(run, scale=trial.loss_scale)
    if trial.dtype:
        args = cast(run.args, jnp.bfloat16)
        if run.rules is not None:
            return dataclasses.replace(run, fun=in_bfloat16(run), args=args, rules=None)
        return dataclasses.replace(run, fun=rewritten(run.fun, "jnp.bfloat16"), args=args)
    changed = run
    if trial.rules:
        changed = dataclasses.replace(changed, rules=trial.rules)
    if trial.lines:
        lines = {int(line.partition(" ")[0].split(":")[1]) for line in trial.lines}
        changed = dataclasses.replace(changed, fun=rewritten(run.fun, "jnp.float32", lines))
    if trial.arguments:
        names = list(inspect.signature(run.fun).parameters)
        args = (
            cast(arg, jnp.float32) if name in trial.arguments else arg for name, arg in zip(names, run.args)
        )
        changed = dataclasses.replace(changed, args=tuple(args))
    return changed


def in_float32(run):
    """The run with every half dtype as float32."""
    fun = rewritten(run.fun, "jnp.float32")
    return dataclasses.replace(run, fun=fun, args=cast(run.args, jnp.float32), rules=None, scale=1.0)


def in_bfloat16(run):
    import jmp_lite as jmp

    return jmp.autocast(run.fun, "bfloat16")


def rewritten(fun, dtype, lines=None):
    """The function with another dtype in place of the half ones: on some lines of its file, or on all."""
    source, first = inspect.getsourcelines(fun)
    start = next(number for number, line in enumerate(source) if line.lstrip().startswith("def "))
    body = [
        NAMES.sub(dtype, line) if lines is None or first + number in lines else line
        for number, line in enumerate(source)
    ]
    namespace = dict(fun.__globals__)
    exec(textwrap.dedent("".join(body[start:])), namespace)
    return namespace[fun.__name__]


def cast(tree, dtype):
    """The tree with its half arrays in another dtype."""
    is_half = lambda leaf: getattr(leaf, "dtype", None) in (jnp.float16, jnp.bfloat16)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype) if is_half(leaf) else leaf, tree)


def results(run: Run):
    """The loss and the unscaled gradients of a run, or the results of a step, as one vector."""
    import jmp_lite as jmp

    if run.step:
        outputs = jax.jit(run.given)(*run.args)
    else:
        outputs = jax.jit(jmp.value_and_grad(run.given, jmp.StaticLossScale(run.scale)))(*run.args)
    floating = [leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in floating])
