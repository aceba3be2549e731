"""The law of remedies for loops, whose carries start from numbers, from other values, or in unread source.

A drawn loss sums half values in one or two loops, of which one overflows. The casts that a report names are
written into the source, and so are the carries that it says to start in float32.
"""

import linecache
import random
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite.diagnostics import find_nonfinite
from tests.support.edits import error, started_in_float32, vector, widened

F16, F32 = jnp.float16, jnp.float32
STARTS = [
    "jnp.zeros((), F16)",
    "F16(0)",
    "jnp.array(0.0, F16)",
    "jnp.zeros_like(u[0])",
    "0 * u[0]",
    "jnp.full((), 0.0, u.dtype)",
    "first()['c']",
    "unread(u)",
    "CONSTANT",
    "x.astype(F16).sum() * 0",
]
LOOPS = [
    "c = lax.scan(lambda c, v: (c + v, None), {start}, u)[0]",
    "c = lax.scan(lambda c, v: (c + v.astype(c.dtype), c), {start}, u)[0]",
    "c = lax.fori_loop(0, 16, lambda i, c: c + u[i], {start})",
    "c, n = lax.scan(lambda c, v: ((c[0] + v, c[1] + 1), None), ({start}, 0), u)[0]",
    "c, m = lax.fori_loop(0, 16, lambda i, c: (c[0] + u[i], c[1] * 0.5), ({start}, {start} + F16(1)))",
    "c = lax.scan(body, {start}, u)[0]",
    "c = lax.scan(lambda c, v: (lax.fori_loop(0, 2, lambda i, d: d + 0.5 * v, c), None), {start}, u)[0]",
    "w = stopped(u); c = lax.while_loop(is_open, lambda s: (s[0] + 1, s[1] + w[s[0]]), (0, {start}))[1]",
    "s = {start}; c = lax.scan(lambda c, v: (c + v, None), s, u)[0]",
]
SOURCE = """
def body(c, v):
    new = c + v
    return new, new * 0
def first():
    return {'c': jnp.zeros((), F16)}
stopped = lax.stop_gradient
def is_open(s):
    return s[0] < 16
"""


class Program:
    """A loss with one or two loops. The second one takes what the first one gives."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.file = f"/drawn/loops_{seed}.py"
        lines = ["u = (x * p).astype(F16)"]
        for number in range(draw.randint(1, 2)):
            lines += ["u = (u * jnp.tanh(c)).astype(F16)"] if number else []
            loop, start = draw.choice(LOOPS), draw.choice(STARTS)
            # JAX does not differentiate a `while` loop.
            is_stopped = "while" in loop and ("u" in start or "x" in start)
            lines += loop.format(start=f"stopped({start})" if is_stopped else start).split("; ")
        lines.append("return jnp.log(1e-30 + c.astype(F32) ** 2) + jnp.mean(p * x) * 1e-3")
        self.source = SOURCE + "def loss(p, x):\n" + "".join(f"    {line}\n" for line in lines)
        x = 1 + jax.random.uniform(jax.random.key(seed), (16,))
        self.args = jnp.ones(16), x * 2.0 ** draw.randint(12, 14)

    def loss(self, source, dtype=F16):
        linecache.cache[self.file] = (0, None, self.source.splitlines(keepends=True), self.file)
        names = {"jax": jax, "jnp": jnp, "lax": lax, "F16": dtype, "F32": F32, "wide": wide}
        names |= {"CONSTANT": jnp.zeros((), dtype), "unread": lambda u: u[0] * 0}
        exec("def unread(u):\n    return zeros((), half)", names | {"zeros": jnp.zeros, "half": dtype}, names)
        module = sys.modules["drawn_loops"] = types.ModuleType("drawn_loops")
        vars(module).update(names, __file__=self.file)
        exec(compile(source, self.file, "exec"), vars(module))
        return module.loss

    def outputs(self, source, dtype=F16):
        value, grads = jax.jit(jax.value_and_grad(self.loss(source, dtype)))(*self.args)
        return float(value), vector(grads)


def wide(tree):
    return jax.tree.map(lambda leaf: leaf.astype(F32) if getattr(leaf, "dtype", None) == F16 else leaf, tree)


@pytest.mark.cases(slow=6)
@pytest.mark.parametrize("seed", range(300))
def test_each_remedy_for_loops_mends_the_program_that_it_is_written_into(seed):
    program = Program(seed)
    exact = program.outputs(program.source, F32)
    report = find_nonfinite(program.loss(program.source))(*program.args)
    if report.cause is None:
        pytest.skip("This one is finite.")
    is_found = any(trial.helps and not trial.dtype for trial in report.tried)
    # No line makes a constant of the module, in which a `while` loop carries what it starts from.
    assert is_found or "CONSTANT" in program.source, f"{program.source}{report}"
    for trial in report.tried:
        if not trial.dtype and not trial.loss_scale:
            source = started_in_float32(program.source, trial.change)
            source = widened(source, " ".join(trial.lines), half=("F16",))
            found, said = program.outputs(source), max(trial.error.loss, trial.error.gradients)
            shown = f"{program.source}{trial}\n{report}"
            assert trial.helps == (error(found, exact) <= 3 * said + 2e-3), shown
