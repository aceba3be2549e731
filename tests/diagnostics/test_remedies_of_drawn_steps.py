"""The law of remedies for steps whose small gradients are lost: the remedy, applied, trains as in float32.

A drawn step casts its parameters before or inside of its loss, scales the loss by hand or not, and divides
the gradients by the scale in half or in float32. Its gradients are small.
"""

import linecache
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_lite.diagnostics import doctor

F16, F32 = jnp.float16, jnp.float32
BEFORE = "half = jax.tree.map(lambda w: w.astype(F16), params)"
LAYERS = {
    "inside": 'jnp.tanh(x.astype(F16) @ p["a"].astype(F16)) @ p["b"].astype(F16)',
    "before": 'jnp.tanh(x.astype(F16) @ p["a"]) @ p["b"]',
    "data_outside": 'jnp.tanh(x @ p["a"]) @ p["b"]',
}
UNSCALED = {
    "in_half": "jax.tree.map(lambda g: (g / SCALE).astype(F32), grads)",
    "in_float32": "jax.tree.map(lambda g: g.astype(F32) / SCALE, grads)",
    "by_a_product": "jax.tree.map(lambda g: (g * (1 / SCALE)).astype(F32), grads)",
}


class Step:
    """A step, whose source says which lines make half values."""

    def __init__(self, layers, unscaled, scale, size, rate):
        self.file = f"/drawn/step_{layers}_{unscaled}_{scale}_{size}.py"
        self.source = f"""
SCALE = {scale}
def loss(p, x, y):
    return {size} * jnp.mean(jnp.square(({LAYERS[layers]}).astype(F32) - y))
def step(params, state, x, y):
    {BEFORE if layers != "inside" else "half = params"}
    {"x = x.astype(F16)" if layers == "data_outside" else "x = x"}
    grads = jax.grad(lambda h: SCALE * loss(h, x, y))(half)
    grads = {UNSCALED[unscaled]}
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state
"""
        self.tx = optax.adam(1e-3, eps=1e-12) if rate is None else optax.sgd(rate / size)
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = {"a": (16, 32), "b": (32, 4)}
        self.params = {n: jax.random.normal(key, shapes[n]) * 0.2 for key, n in zip(keys, shapes)}
        x, y = jax.random.normal(keys[2], (32, 16)), jax.random.normal(keys[3], (32, 4))
        self.args = (self.params, self.tx.init(self.params), x, y)

    def function(self, edit=lambda number, line: line):
        """The step, with each line of the source edited."""
        lines = self.source.splitlines(keepends=True)
        linecache.cache[self.file] = (len(self.source), None, lines, self.file)
        names = {"jax": jax, "jnp": jnp, "optax": optax, "TX": self.tx, "F16": F16, "F32": F32}
        source = "".join(edit(number, line) for number, line in enumerate(lines, 1))
        exec(compile(source, self.file, "exec"), names)
        return names["step"]

    def line(self, text):
        return next(n for n, line in enumerate(self.source.splitlines(), 1) if text in line)

    def applied(self, advice):
        """The step with what a page says that mends it."""
        said = advice.partition(". Then it trains")[0]
        _, _, gradients = said.partition("before the arithmetic on ")
        wide, gradients = said.removesuffix(gradients), gradients.partition(";")[0]
        lines, read = ({int(n) for n in re.findall(r"\.py:(\d+):", text)} for text in (wide, gradients))

        def edit(number, line):
            line = line.replace("F16", "F32") if number in lines else line
            return re.sub(r"\(g ([/*])", r"(g.astype(F32) \1", line) if number in read else line

        return self.function(edit)

    def moved(self, step):
        """How far 20 steps move each parameter."""
        params, state, *batch = self.args
        for _ in range(20):
            params, state = step(params, state, *batch)
        return jax.tree.map(lambda new, old: np.asarray(new - old, np.float64), params, self.params)


def errors(found, exact):
    """For each parameter, the share of elements that never move, and the relative error of its movement."""
    for name, way in exact.items():
        norm = np.linalg.norm
        yield np.mean(found[name][way != 0] == 0), norm(found[name] - way) / norm(way)


def page_of(step):
    findings = doctor(step.function(), device=None, value_and_grad_fn=None)(*step.args).findings
    return [finding for finding in findings if finding.severity != "speed"]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("rate", [None, 1.0], ids=["adam", "sgd"])
def test_gradients_that_are_divided_by_the_scale_in_half_are_named_by_that_line(rate):
    step = Step("before", "in_half", 2.0**14, 1e-6, rate)
    (fault,) = page_of(step)
    line = f"{step.file}:{step.line('g / SCALE')}:"
    assert fault.advice.startswith(
        f"To mend it: cast the gradients to float32 before the arithmetic on line {line}"
    )
    assert "hint" not in fault.advice  # The loss is scaled.


@pytest.mark.cases(slow=6)
@pytest.mark.parametrize("seed", range(120))
def test_each_remedy_of_a_step_trains_as_in_float32(seed):
    draw = random.Random(seed)
    layers, unscaled = draw.choice(list(LAYERS)), draw.choice(list(UNSCALED))
    scale, size = draw.choice([1.0, 2.0**10, 2.0**14]), 10.0 ** -draw.randint(2, 7)
    step = Step(layers, unscaled, scale, size, draw.choice([None, 1.0]))
    exact = step.moved(step.function(lambda _, line: line.replace("F16", "F32")))
    before = list(errors(step.moved(step.function()), exact))
    faults = page_of(step)
    # A right step gets no finding, and a step that loses updates gets one.
    if max(off for _, off in before) < 0.05:
        assert faults == []
    if max(lost for lost, _ in before) > 0.5:
        assert faults
    for fault in faults:
        if "To mend it: " in fault.advice:
            after = list(errors(step.moved(step.applied(fault.advice)), exact))
            assert max(lost for lost, _ in after) < 0.1, f"{step.source}{fault}{after}"
            assert max(off for _, off in after) < 0.2, f"{step.source}{fault}{after}"
