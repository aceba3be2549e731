"""The law of remedies for programs with layers: functions and classes that cast, some by a helper.

Each drawn loss calls two to four of the layers below, so that a cast may take a value in half already, as in
`half(x)` of a layer that follows another. It overflows in the forward pass, or its gradients do. Each edit
that a report names is written into the source at its place.
"""

import bisect
import collections
import functools
import linecache
import random
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_lite as jmp
from jmp_lite.diagnostics import find_nonfinite
from tests.support.edits import error, vector, widened

F16, F32 = jnp.float16, jnp.float32
LAYERS = {
    "dense": """
        def dense(w, x, dtype=F16):
            x = jnp.asarray(x, dtype)
            w = w.astype(dtype)
            return x @ w
        """,
    "convolution": """
        def convolution(w, x):
            x = half(x)
            return lax.conv(x[..., None], half(w)[..., None], (1,), "VALID")[..., 0]
        """,
    "Layer": """
        class Layer:
            dtype = F16
            def __call__(self, w, x):
                y = x.astype(self.dtype) @ w.astype(self.dtype)
                return ACT(y)
        """,
    "norm": """
        def norm(w, x):
            m = jnp.mean(x.astype(F32) ** 2, -1, keepdims=True)
            return (x.astype(F32) * lax.rsqrt(m + 1e-3)).astype(F16) * w[0].astype(F16)
        """,
    "residual": """
        def residual(w, x):
            y = ACT(dense(w, x))
            return x.astype(F16) + y
        """,
    "gated": """
        def gated(w, x):
            a = half(x) @ half(w)
            return lax.mul(jax.nn.sigmoid(a), half(x))
        """,
    "chosen": """
        def chosen(w, x):
            y = (x @ w).astype(F16)
            return lax.select(y > 0, y, jnp.zeros(y.shape, F16))
        """,
    "joined": """
        def joined(w, x):
            y = half(x @ w)
            z = lax.concatenate([y[:, :4], half(x)[:, 4:]], 1)
            return ACT(z)
        """,
    "recurrent": """
        def recurrent(w, x):
            c0 = jnp.zeros(x.shape[1:], F16)
            def body(c, u):
                c = ACT(half(u) @ half(w) + 0.5 * c)
                return c, c
            return lax.scan(body, c0, x)[1]
        """,
    "branch": """
        def branch(w, x):
            y = half(x) @ half(w)
            return lax.cond(jnp.sum(w) < 1e9, lambda y: y * FACTOR, lambda y: y.astype(F16), y)
        """,
    "skip": """
        def skip(w, x):
            u = half(x)
            return x + ACT(u @ half(w))
        """,
    "plain": """
        def plain(w, x):
            return ACT(x) @ half(w)
        """,
    "twice": """
        def twice(w, x):
            u = x * FACTOR
            return u + ACT(x @ w.astype(F16))
        """,
    "half": """
        def half(x):
            return x.astype(F16)
        """,
}
CALLS = [
    "{layer}(p['{name}'], h)",
    "{layer}(p['{name}'], h) * FACTOR",
    "ACT({layer}(p['{name}'], h)).astype(F32)",
]
# Calls that cast as well, where an operation inside of a function takes or gives what is in half already.
CASTING = [
    "{layer}(p['{name}'], h.astype(F16))",
    "{layer}(p['{name}'].astype(F16), half(h))",
    "{layer}(p['{name}'], h).astype(F16)",
    "half({layer}(x=h, w=p['{name}']))",
    "jax.jit({layer})(p['{name}'], h.astype(F16))",
    "jax.checkpoint({layer})(p['{name}'], h.astype(F16)) * FACTOR",
    "lax.cond(jnp.sum(y) < 1e9, lambda v: {layer}(p['{name}'], v), lambda v: v, h.astype(F16))",
    "lax.cond(jnp.sum(y) < 1e9, {layer}, lambda w, v: v, p['{name}'], h.astype(F16))",
    "lax.fori_loop(0, 2, lambda i, c: {layer}(p['{name}'], c).astype(F16), h.astype(F16))",
]
# Calls of a function by another name than its own, and of a function that changes what it passes on.
NAMED = [
    "TABLE['{layer}'](p['{name}'], h.astype(F16))",
    "halved({layer})(p['{name}'], h)",
    "rounded({layer})(p['{name}'], h)",
    "rounded(halved({layer}))(p['{name}'], h)",
    "(other := {layer})(p['{name}'], h.astype(F16))",
    "called({layer}, p['{name}'], h)",
    "called({layer}, p['{name}'], h.astype(F16)).astype(F16)",
    "functools.partial({layer}, p['{name}'])(h.astype(F16))",
    "(lambda w, v: {layer}(w, v.astype(F16)))(p['{name}'], h)",
]
# Values that are kept in tuples, dicts and objects between the cast and the layer, or after it.
KEPT = [
    "h = pair({layer}, p['{name}'], h)[0]",
    "h, v = pair({layer}, p['{name}'], h.astype(F16)); h = h.astype(F16) + 0 * v.astype(F16)",
    "args = p['{name}'], h.astype(F16); h = {layer}(*args)",
    "batch = {{'w': p['{name}'], 'h': h.astype(F16)}}; h = {layer}(batch['w'], batch['h'])",
    "out = {{'h': {layer}(p['{name}'], h)}}; h = out['h'].astype(F16)",
    "state = State(p['{name}'], h.astype(F16)); h = {layer}(state.w, state.h)",
    "h = {layer}(**dict(w=p['{name}'], x=h.astype(F16)))",
    "hs = [h.astype(F16)]; hs.append({layer}(p['{name}'], hs[-1])); h = hs[-1].astype(F16)",
    "w, v = jax.tree.map(lambda v: v.astype(F16), (p['{name}'], h)); h = {layer}(w, v)",
    "w, v = jax.tree.map(half, (p['{name}'], h)); h = {layer}(w, v).astype(F16)",
    "g = h.astype(F16); h = (lambda w: {layer}(w, g))(p['{name}'])",
    "h = h.astype(F16) if h.ndim == 2 else h; h = {layer}(p['{name}'], h)",
    "h = functools.reduce(lambda v, w: {layer}(w, v.astype(F16)), [p['{name}']] * 2, h)",
    "h = [{layer}(w, v.astype(F16)).astype(F16) for w, v in [(p['{name}'], h)]][0]",
]
# What is half whatever it takes, also by a function that no edit of a cast reaches.
RECAST = [
    "h = {layer}(p['{name}'], functools.partial(jnp.asarray, dtype=F16)(h))",
    "h = {layer}(p['{name}'], jnp.zeros(h.shape, F16).at[:].set(h))",
    "h = jnp.sum({layer}(p['{name}'], h)[None], 0, dtype=F16)",
    "h = jnp.dot({layer}(p['{name}'], h), p['{name}'].astype(F16), preferred_element_type=F16)",
    "h = {layer}(p['{name}'], jmp.Policy(F32, F16, F32).cast_to_compute(h))",
]
WRAPPERS = """
        State = collections.namedtuple("State", "w h")
        def pair(fun, w, x):
            y = half(x)
            return fun(w, y), y
        def halved(fun):
            def run(w, x):
                return fun(w.astype(F16), half(x))
            return run
        def rounded(fun):
            def run(*args, **kwargs):
                return fun(*args, **kwargs).astype(F16)
            return run
        def called(fun, w, x):
            y = x.astype(F16)
            return fun(w, y)
        """
BOOSTED = [
    ["h = large(h)", "h = small(h)"],
    ["h = large(h)", "h = small(h.astype(F16))"],
    ["h = large(h.astype(F16))", "h = small(half(h))"],
    ["h = small(large(h).astype(F16))"],
]
ENDS = [
    "jnp.mean((h.astype(F32) - y) ** 2)",
    "jnp.mean(jnp.square(h.astype(F32)) - h.astype(F32) * y)",
    "jnp.mean(h.astype(F32) * y)",
]


class Program:
    """A loss and a step. `FACTOR` has the value 0.01, 3 or 20 at each place.

    With `kind="calls"` or "names" the calls cast as well, and what overflows is inside of a function.
    """

    def __init__(self, seed, kind="layers"):
        draw = random.Random(seed)
        self.file = f"/drawn/layers_{seed}_{kind}.py"
        self.is_backward = draw.random() < 0.5
        self.is_step = self.is_backward or draw.random() < 0.5
        names = "abcd"[: draw.randint(2, 4)]
        layers = [draw.choice([name for name in LAYERS if name != "half"]) for _ in names]
        lines, self.is_recast = [], False
        for name, layer in zip(names, layers):
            called = "Layer()" if layer == "Layer" else layer
            line = draw.choice(
                {"layers": CALLS, "calls": CASTING, "names": NAMED, "kept": [*KEPT, *RECAST]}[kind]
            )
            self.is_recast |= line in RECAST
            line = ("" if kind == "kept" else "h = ") + line.format(layer=called, name=name)
            lines += line.split("; ")
        if not self.is_backward:
            large = ["h = h * LARGE * LARGE", "h = h.astype(F32) / LARGE / LARGE"]
            large = draw.choice(BOOSTED) if kind != "layers" else large
            at = draw.randint(1, len(lines))
            lines[at:at] = large
        used = [name for name in LAYERS if name in (*layers, "half", "dense")]
        source = "".join(_dedented(LAYERS[name]) for name in used)
        if kind in ("names", "kept"):
            source += _dedented(WRAPPERS)
            called = [name.replace("Layer", "Layer()") for name in used]
            source += f"TABLE = {{{', '.join(f'{name!r}: {name}' for name in called)}}}\n"
        if kind != "layers":
            source += "def large(h):\n    return h * LARGE * LARGE\n"
            source += "def small(h):\n    return (h / LARGE / LARGE).astype(F32)\n"
        source += "".join(f"    {line}\n" for line in ("def loss(p, x, y):", "h = x", *lines)).removeprefix(
            "    "
        )
        source += f"    return {draw.choice(ENDS)} * SCALE\n"
        source += "def step(p, x, y):\n    value, grads = jax.value_and_grad(loss)(p, x, y)\n"
        source += "    return jax.tree.map(lambda g: g / SCALE, grads), value / SCALE\n"
        acts = ["jnp.tanh", "jnp.sin", "jax.nn.gelu", "jax.nn.relu"]
        source = re.sub(r"\bACT\b", lambda _: draw.choice(acts), source)
        self.source = re.sub("FACTOR", lambda _: draw.choice(["0.01", "3", "20"]), source)
        keys = iter(jax.random.split(jax.random.key(seed), 8))
        size = draw.choice([0.3, 1.0])
        params = {name: size * jax.random.normal(next(keys), (8, 8)) for name in names}
        self.args = params, *(jax.random.normal(next(keys), (16, 8)) for _ in range(2))
        self.numbers = {"SCALE": 1.0, "LARGE": 1.0}
        name = "SCALE" if self.is_backward else "LARGE"
        self.numbers[name] = self.first_bad(name) * 2.0 ** draw.randint(0, 2)

    def first_bad(self, name):
        """The smallest power of two from 1 on at which a result is not finite."""
        source = self.source.replace("def loss(p, x, y)", f"def loss(p, x, y, {name})")
        run = jax.jit(jax.value_and_grad(self.functions(source)[0]))  # One program for all of them.

        def is_bad(exponent):
            return not np.isfinite(vector(run(*self.args, 2.0**exponent))).all()

        # Two powers of two that float16 has, of which the second one overflows.
        return 2.0 ** bisect.bisect_left(range(40 if self.is_backward else 13), True, key=is_bad)

    def functions(self, source):
        linecache.cache[self.file] = (0, None, self.source.splitlines(keepends=True), self.file)
        names = {"jax": jax, "jnp": jnp, "lax": lax, "functools": functools, "collections": collections}
        names |= {"F16": F16, "F32": F32, "jmp": jmp, **self.numbers}
        # The names of dtypes are those of a module.
        module = sys.modules["drawn_layers"] = types.ModuleType("drawn_layers")
        vars(module).update(names, __file__=self.file)
        exec(compile(source, self.file, "exec"), names)
        return names["loss"], names["step"]

    def outputs(self, source):
        loss, step = self.functions(source)
        grads, value = (
            jax.jit(step)(*self.args) if self.is_step else jax.jit(jax.value_and_grad(loss))(*self.args)[::-1]
        )
        return float(value), vector(grads)


def _dedented(text):
    lines = text.strip("\n").rstrip().split("\n")
    return "".join(f"{line[8:]}\n" for line in lines)


# A number of the program may be beyond float16, which NumPy says while JAX traces it.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("kind", ["layers", "calls", "names", "kept"])
@pytest.mark.parametrize("seed", range(300))
def test_each_remedy_for_layers_mends_the_program_that_it_is_written_into(seed, kind):
    program = Program(seed, kind)
    exact = program.outputs(program.source.replace("F16", "F32"))
    how = {"value_and_grad_fn": None} if program.is_step else {}
    loss, step = program.functions(program.source)
    report = find_nonfinite(step if program.is_step else loss, **how)(*program.args)
    if report.cause is None:
        pytest.skip("This one is finite.")
    # bfloat16 is tried in any case: one edit of the calls is said to be enough.
    is_found = any(trial.helps and not trial.dtype for trial in report.tried)
    assert is_found or program.is_recast, f"{program.source}{report}"
    for trial in report.remedies:
        if not trial.dtype and not trial.loss_scale:
            source = widened(program.source, " ".join(trial.lines), half=("F16", "dtype"))
            found, said = program.outputs(source), max(trial.error.loss, trial.error.gradients)
            assert error(found, exact) <= 3 * said + 2e-3, f"{program.source}{trial}\n{report}"
