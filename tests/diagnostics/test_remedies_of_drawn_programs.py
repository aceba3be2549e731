"""The law of remedies: what a report says that fixes it, written into the source, fixes it.

A drawn program has two to four half values, each from a cast, a layer or an argument in half. One of them
overflows, in the forward or in the backward pass, and an everyday operation follows it. Each remedy that is
printed is applied by rewriting the source; the program that results is run without any tool, and is as near
to float32 as the report says.
"""

import linecache
import random
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite.diagnostics import find_nonfinite
from tests.support.broken.remedies import cast
from tests.support.edits import error, vector, widened

F16, F32 = jnp.float16, jnp.float32
OPERATIONS = {
    "nothing": "z",
    "where_of_a_number": "jnp.where(jnp.arange(8) < 6, z, 0.0)",
    "where_of_zeros": "jnp.where(jnp.arange(8) < 6, z, jnp.zeros_like(z))",
    "relu": "jax.nn.relu(z)",
    "leaky_relu": "jax.nn.leaky_relu(z)",
    "gelu": "jax.nn.gelu(z)",
    "dropout_by_hand": "jnp.where(jax.random.bernoulli(key, 0.9, z.shape), z / 0.9, jnp.zeros_like(z))",
    "dropout": 'nn.Dropout(0.1, deterministic=False).apply({}, z, rngs={"dropout": key})',
    "set_at": "jnp.zeros_like(z).at[:, :4].set(z[:, :4])",
    "pad": "jnp.pad(z, ((0, 0), (0, 3)))",
    "concatenate": "jnp.concatenate([jnp.zeros_like(z[:1]), z[1:]])",
    "tril": "jnp.tril(z)",
    "scan_from_zeros": "lax.scan(lambda c, u: (c + u, None), jnp.zeros_like(z[0]), z)[0]",
    "logsumexp": "jax.nn.logsumexp(z, -1)",
    "cumsum": "jnp.cumsum(z, 0)",
    "max": "jnp.max(z, -1)",
    # The functions of `jax.lax` do not promote: all operands, carries and branches have one dtype.
    "lax_select": "lax.select(jnp.tril(jnp.ones(z.shape, bool)), z, jnp.full(z.shape, -2.0, F16))",
    "lax_concatenate": "lax.concatenate([z, (0.1 * x).astype(F16)], 0)",
    "lax_mul": "lax.mul(z, F16(1.5) * jnp.ones(z.shape, F16))",
    "dynamic_update_slice": "lax.dynamic_update_slice(jnp.asarray(x, F16), z[:2], (1, 0))",
    "scan_from_half": "lax.scan(lambda c, u: ((0.5 * c + u).astype(F16), None), jnp.ones(8, F16), z)[0]",
    "scan_of_halves": "lax.scan(lambda c, u: ((c + u.astype(F32)).astype(F16), None), x[0].astype(F16), z)"
    "[0]",
    "fori_loop": "lax.fori_loop(0, 2, lambda i, c: (0.5 * c).astype(F16), z)",
    "scalar_carry": "z * lax.fori_loop(0, 3, lambda i, c: c * 1.5, jnp.ones((), dtype=F16))",
    "cond": "lax.cond(x[0, 0] < 9, lambda: z, lambda: jnp.full(z.shape, 2.0, F16))",
}
HALVES = {
    "cast": '(h @ p["{n}"]["kernel"]).astype({half})',
    "cast_before": 'h.astype({half}) @ p["{n}"]["kernel"].astype({half})',
    "layer": 'Net({half}, "{n}").apply({{"params": {{"{n}": {{"kernel": p["{n}"]["kernel"]}}}}}}, h)',
    "argument": "h.astype({n}.dtype) @ {n}",
    "convolution": 'lax.conv(h.astype({half})[..., None], p["{n}"]["kernel"].astype({half})[..., None], '
    '(1,), "VALID")[..., 0]',
}


class Net(nn.Module):
    """A network with one layer of a dtype, whose name is that of its weights."""

    dtype: Any
    layer: str

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, use_bias=False, dtype=self.dtype, name=self.layer)(x)


class Program:
    """A program, whose source says which lines and arguments make half values."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.file = f"/drawn/program_{seed}.py"
        names = list("abcd")[: draw.randint(2, 4)]
        bad = draw.randrange(1, len(names))
        self.is_step = draw.random() < 0.3
        is_backward = self.is_step and draw.random() < 0.5
        operation = draw.choice(list(OPERATIONS))
        lines = ["def loss(p, x, key, a, b, c, d):", "    h = x"]
        for number, name in enumerate(names):
            lines.append(f"    h = {HALVES[draw.choice(list(HALVES))].format(n=name, half='F16')}")
            if number == bad:
                lines += [f"    z = h * {1 if is_backward else 300}", f"    z = {OPERATIONS[operation]}"]
                lines.append("    h = jnp.tanh(h).astype(F32)")
            else:
                lines.append("    h = jnp.tanh(h).astype(F32)")
        end = "jnp.mean(z.astype(F32)) * 1e8" if is_backward else "jnp.mean((z * z).astype(F32)) * 1e-4"
        lines.append(f"    return {end} + jnp.mean(h)")
        lines += [
            "def step(p, x, key, a, b, c, d):",
            "    value, grads = jax.value_and_grad(loss)(p, x, key, a, b, c, d)",
        ]
        lines.append("    return jax.tree.map(lambda p, g: p - 1e-6 * g, p, grads), value")
        self.source = "\n".join(lines) + "\n"
        keys = jax.random.split(jax.random.key(seed), 6)
        weights = {name: jax.random.normal(k, (8, 8)) for name, k in zip("abcd", keys)}
        halves = [weight.astype(F16) for weight in weights.values()]
        weights = {name: {"kernel": weight} for name, weight in weights.items()}
        self.args = (weights, jax.random.normal(keys[4], (4, 8)), keys[5], *halves)

    def functions(self, source=None):
        """The loss and the step, with another source in place of their own."""
        linecache.cache[self.file] = (0, None, self.source.splitlines(keepends=True), self.file)
        namespace = {"jax": jax, "jnp": jnp, "lax": lax, "nn": nn, "Net": Net, "F16": F16, "F32": F32}
        exec(compile(source or self.source, self.file, "exec"), namespace)
        return namespace["loss"], namespace["step"]

    def applied(self, trial):
        """The functions and the arguments with what a trial has changed."""
        if trial.dtype:
            return self.functions(self.source.replace("F16", "jnp.bfloat16")), cast(self.args, jnp.bfloat16)
        source = widened(self.source, " ".join(trial.lines))
        for name in re.findall(r"dtype=jnp.float32 in (?:\w+/)*(\w+)", trial.change):
            source = source.replace(f'F16, "{name}"', f'F32, "{name}"')
        named = zip(("p", "x", "key", "a", "b", "c", "d"), self.args)
        args = [cast(arg, F32) if name in trial.arguments else arg for name, arg in named]
        return self.functions(source), args


def outputs(functions, args, is_step):
    """The loss and the gradients, or the change of the parameters."""
    loss, step = functions
    if is_step:
        new, value = jax.jit(step)(*args)
        return float(value), vector(jax.tree.map(jnp.subtract, new, args[0]))
    value, grads = jax.jit(jax.value_and_grad(loss))(*args)
    return float(value), vector(grads)


@pytest.mark.cases(slow=14)
@pytest.mark.parametrize("seed", range(400))
def test_each_remedy_that_is_printed_mends_the_program_that_it_is_written_into(seed):
    program = Program(seed)
    loss, step = program.functions()
    exact = outputs(
        program.functions(program.source.replace("F16", "F32")),
        cast(program.args, F32),
        program.is_step,
    )
    how = {"value_and_grad_fn": None} if program.is_step else {}
    report = find_nonfinite(step if program.is_step else loss, **how)(*program.args)
    if report.cause is None:
        pytest.skip("This one is finite.")
    # bfloat16 is tried in any case: one edit of the lines is said to be enough.
    assert any(trial.helps and not trial.dtype for trial in report.tried), f"{program.source}{report}"
    for trial in report.remedies:
        found = error(outputs(*program.applied(trial), program.is_step), exact)
        said = max(trial.error.loss, trial.error.gradients)
        assert found <= 3 * said + 2e-3, f"{program.source}{trial}: {found}\n{report}"
