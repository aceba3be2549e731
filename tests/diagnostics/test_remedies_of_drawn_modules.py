"""The law of remedies for modules of Flax with a `dtype`: the one that a report names mends the program.

A drawn model of Linen or NNX has one to three blocks with dense layers in half, and computes with what they
give: squares, norms and quotients by hand. One of these is too large for half, or its gradient is.
"""

import linecache
import random
import re
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from jmp_lite.diagnostics import find_nonfinite
from tests.support.edits import error, vector

F16, F32 = jnp.float16, jnp.float32
OPERATIONS = [
    "jnp.square(h)",
    "h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)",
    "h / jnp.linalg.norm(h, axis=-1, keepdims=True)",
    "jnp.tanh(h)",
    "nn.relu(h) * h",
    "h + x[..., :1].astype(h.dtype)",
    "nn.softmax(h * 8)",
    "h.astype(F32)",
]
MODELS = {
    "linen": """
class {name}(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = x
{body}
        return h
""",
    "nnx": """
class {name}(nnx.Module):
    def __init__(self, rngs):
{init}
    def __call__(self, x):
        h = x
{body}
        return h
""",
}
LOSSES = {
    "linen": "def loss(p, x, y): return jnp.mean((Net().apply(p, x).astype(F32) - y) ** 2 * SCALE)",
    "nnx": "def loss(m, x, y): return jnp.mean((m(x).astype(F32) - y) ** 2 * SCALE)",
    "split": "def loss(p, x, y): return jnp.mean((nnx.merge(GRAPH, p)(x).astype(F32) - y) ** 2 * SCALE)",
}


class Program:
    """A model and its loss. `DTYPES` has the dtype of each layer by its path."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.file = f"/drawn/modules_{seed}.py"
        self.kind = draw.choice(["linen", "nnx", "split"])
        self.root = {"linen": "Net", "nnx": "m", "split": "p"}[self.kind]
        self.is_step = draw.random() < 0.3 and self.kind != "nnx"
        kind = "linen" if self.kind == "linen" else "nnx"
        names = [f"b{n}" for n in range(draw.randint(1, 3))]
        self.dtypes, parts = {}, []
        # A layer of the model itself, or those of a block.
        blocks = {name: draw.randint(0, 2) for name in names}
        for name, count in blocks.items():
            paths = [f"{self.root}/{name}/l{n}" for n in range(count)] if count else [f"{self.root}/{name}"]
            self.dtypes |= {path: draw.choice([F16, F16, F32]) for path in paths}
            if count:
                parts.append(
                    _model(kind, name.title(), {path[-2:]: _layer(kind, path) for path in paths}, draw)
                )
        layers = {
            name: _layer(kind, f"{self.root}/{name}") if not count else _block(kind, name)
            for name, count in blocks.items()
        }
        source = "".join([*parts, _model(kind, "Net", layers, draw), LOSSES[self.kind], "\n"])
        source += "def step(p, x, y):\n    value, grads = jax.value_and_grad(loss)(p, x, y)\n"
        source += "    return jax.tree.map(lambda g: g / SCALE, grads), value / SCALE\n"
        self.source = source
        keys = jax.random.split(jax.random.key(seed), 3)
        self.x = jax.random.normal(keys[0], (16, 8)) * draw.choice([30.0, 400.0, 1500.0])
        self.y, self.key = jax.random.normal(keys[1], (16, 8)), keys[2]
        self.scale = draw.choice([1.0, 2.0**15, 2.0**20])

    def functions(self, dtypes=None):
        linecache.cache[self.file] = (0, None, self.source.splitlines(keepends=True), self.file)
        names = {"jax": jax, "jnp": jnp, "lax": lax, "nn": nn, "nnx": nnx, "F16": F16, "F32": F32}
        names |= {"DTYPES": dtypes or self.dtypes, "SCALE": self.scale}
        module = sys.modules["drawn_modules"] = types.ModuleType("drawn_modules")
        vars(module).update(names, __file__=self.file)
        exec(compile(self.source, self.file, "exec"), vars(module))
        if self.kind == "linen":
            first = jax.jit(module.Net().init)(self.key, self.x)
        else:
            first = module.Net(nnx.Rngs(self.key))
        if self.kind == "split":
            module.GRAPH, first = nnx.split(first)
        how = {"value_and_grad_fn": nnx.value_and_grad} if self.kind == "nnx" else {}
        if self.is_step:
            return module.step, (first, self.x, self.y), {"value_and_grad_fn": None}
        return module.loss, (first, self.x, self.y), how

    def outputs(self, dtypes=None):
        fun, args, _ = self.functions(dtypes)
        if self.is_step:
            grads, value = jax.jit(fun)(*args)
        elif self.kind == "nnx":
            value, grads = nnx.jit(nnx.value_and_grad(fun))(*args)
        else:
            value, grads = jax.jit(jax.value_and_grad(fun))(*args)
        return float(value), vector(grads)


def _layer(kind, path):
    if kind == "linen":
        return f"nn.Dense(8, dtype=DTYPES['{path}'], name='{path.rpartition('/')[2]}')"
    return f"nnx.Linear(8, 8, dtype=DTYPES['{path}'], rngs=rngs)"


def _block(kind, name):
    return f"{name.title()}(name='{name}')" if kind == "linen" else f"{name.title()}(rngs)"


def _model(kind, name, layers, draw):
    body = []
    for layer, made in layers.items():
        body.append(f"h = {made}(h)" if kind == "linen" else f"h = self.{layer}(h)")
        body += [f"h = {draw.choice(OPERATIONS)}" for _ in range(draw.randint(0, 2))]
    init = "\n".join(f"        self.{layer} = {made}" for layer, made in layers.items())
    return MODELS[kind].format(name=name, init=init, body="\n".join(f"        {line}" for line in body))


@pytest.mark.cases(slow=6)
@pytest.mark.parametrize("seed", range(300))
def test_each_remedy_for_modules_mends_the_program(seed):
    program = Program(seed)
    fun, args, how = program.functions()
    exact = program.outputs(dict.fromkeys(program.dtypes, F32))
    before = error(program.outputs(), exact)
    report = find_nonfinite(fun, **how)(*args)
    shown = f"{program.source}{program.dtypes} {program.scale} {before}\n{report}"
    if report.harmless and not report.earlier and report.cause is None:
        assert before <= 0.4, f"It is not harmless: {shown}"
    if report.cause is None:
        pytest.skip("This one is finite.")
    for trial in report.tried:
        paths = re.findall(r"dtype=jnp.float32 in (\S+?)(?:;|$)", trial.change)
        if trial.dtype or trial.loss_scale or not paths:
            continue
        # The path of a block stands for the layers inside.
        inside = [path for path in program.dtypes if any(f"{path}/".startswith(f"{each}/") for each in paths)]
        found = error(program.outputs(program.dtypes | dict.fromkeys(inside, F32)), exact)
        said = max(trial.error.loss, trial.error.gradients)
        if trial.helps:
            assert found <= 3 * said + 2e-3, f"{found} {trial}\n{shown}"
        elif "astype" not in trial.change:
            assert not found <= 0.05, f"It helps: {found} {trial}\n{shown}"
