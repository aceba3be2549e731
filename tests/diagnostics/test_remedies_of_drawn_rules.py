"""The law of remedies for functions of autocast: the rules and lines that a page prints mend the function.

A drawn function has two to four layers with matmuls: in named scopes, in modules of Linen, in a loop or a
conditional, with paths of parameters alone, or with a cast to half of their own. One of them overflows in
half, or a difference of two of them loses its digits. The rules are given to autocast, the lines are written
into the source, and the function that results is as near to float32 as the page says.
"""

import ast
import linecache
import random
import re
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp_lite as jmp
from jmp_lite.diagnostics import doctor
from tests.diagnostics.test_remedies_of_drawn_programs import OPERATIONS, Net
from tests.support.broken.remedies import cast
from tests.support.edits import error, vector, widened

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
LAYERS = {
    "scope": ['    with jax.named_scope("{n}"):', '        h = jnp.dot(h, p["{n}"]["kernel"])'],
    "two_scopes": [
        '    with jax.named_scope("{n}"):',
        '        with jax.named_scope("inner"):',
        '            u = jnp.tanh(h @ p["{n}"]["kernel"])',
        '        h = u @ p["{n}"]["kernel"].T',
    ],
    "path": ['    h = jnp.einsum("bi,ij->bj", h, p["{n}"]["kernel"])'],
    "linen": ['    h = nn.Dense(8, use_bias=False, name="{n}").apply({{"params": p["{n}"]}}, h)'],
    "scan": [
        '    with jax.named_scope("{n}"):',
        '        w = jnp.stack([p["{n}"]["kernel"]] * 2)',
        "        h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, w)[0]",
    ],
    "cond": ['    h = lax.cond(x[0, 0] < 9, lambda h: h @ p["{n}"]["kernel"], lambda h: h, h)'],
    "cast": ['    h = (h @ p["{n}"]["kernel"]).astype(HALF)'],
    "layer": ['    h = Net(HALF, "{n}").apply({{"params": {{"{n}": p["{n}"]}}}}, h)'],
    "argument": ["    h = h.astype({n}.dtype) @ {n}"],
    "cast_before": [
        '    with jax.named_scope("{n}"):',
        '        h = h.astype(HALF) @ p["{n}"]["kernel"].astype(HALF)',
    ],
}
FAULTS = {
    "overflow": ["    z = h @ (p['{n}']['kernel'] * 3e4)"],
    "overflow_in_scope": [
        "    with jax.named_scope('bad'):",
        "        z = (h * 300) @ p['{n}']['kernel'] * 300",
    ],
    "difference": [
        "    with jax.named_scope('bad'):",
        "        z = 1e3 * (h @ p['{n}']['kernel'] - (h + 1e-3 * jnp.tanh(x)) @ p['{n}']['kernel'])",
    ],
    "cast": ["    z = (h * 1e3).astype(HALF) * 100"],
}


class Function:
    """A function for autocast, whose source says which lines make half values."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.file = f"/drawn/rules_{seed}.py"
        self.dtype = draw.choice([F16, F16, BF16])
        names = list("abcd")[: draw.randint(2, 4)]
        bad = draw.randrange(len(names))
        lines = ["def loss(p, x, key, a, b, c, d):", "    h = x"]
        for number, name in enumerate(names):
            lines += [line.format(n=name) for line in LAYERS[draw.choice(list(LAYERS))]]
            if number == bad:
                self.fault = draw.choice(list(FAULTS))
                lines += [line.format(n=name) for line in FAULTS[self.fault]]
                operation = OPERATIONS[draw.choice(list(OPERATIONS))]
                operation = operation.replace("F16(1.5)", "jnp.asarray(1.5, z.dtype)").replace(
                    "F16", "z.dtype"
                )
                lines.append(f"    z = {operation}")
            lines.append("    h = jnp.tanh(h).astype(F32)")
        lines.append("    return jnp.mean((z * z).astype(F32)) * 1e-4 + jnp.mean(h)")
        half = {F16: "F16", BF16: "BF16"}[self.dtype]
        lines += [
            "def step(p, *args):",
            "    fun = jmp.autocast(loss, DTYPE, rules=RULES)",
            "    value, grads = jax.value_and_grad(fun)(p, *args)",
            "    return jax.tree.map(lambda p, g: p - 1e-6 * g, p, grads), value",
        ]
        self.source = "\n".join(lines).replace("HALF", half) + "\n"
        self.is_step = draw.random() < 0.3
        keys = jax.random.split(jax.random.key(seed), 6)
        weights = {name: {"kernel": jax.random.normal(k, (8, 8))} for name, k in zip("abcd", keys)}
        halves = [weight["kernel"].astype(self.dtype) for weight in weights.values()]
        self.args = weights, jax.random.normal(keys[4], (4, 8)), keys[5], *halves

    def function(self, source=None, rules=None, dtype=None):
        """The function of autocast; the step with it for a step."""
        linecache.cache[self.file] = (0, None, self.source.splitlines(keepends=True), self.file)
        names = {"jax": jax, "jnp": jnp, "lax": lax, "nn": nn, "jmp": jmp, "Net": Net}
        names |= {"F16": F16, "BF16": BF16, "F32": F32, "DTYPE": dtype or self.dtype, "RULES": rules}
        # The names of dtypes are those of a module.
        module = sys.modules["drawn_rules"] = types.ModuleType("drawn_rules")
        vars(module).update(names, __file__=self.file)
        exec(compile(source or self.source, self.file, "exec"), names)
        if self.is_step:
            return names["step"]
        return jmp.autocast(names["loss"], dtype or self.dtype, rules=rules)

    def outputs(self, fun, args=None, scale=1.0):
        """The loss and the gradients, or the change of the parameters."""
        # By default XLA leaves out casts to half, each by itself: a difference of two products is then noise.
        fun = fun if self.is_step else jmp.value_and_grad(fun, jmp.StaticLossScale(scale))
        run = jax.jit(fun, compiler_options={"xla_allow_excess_precision": False})
        args = args or self.args
        if self.is_step:
            new, value = run(*args)
            return float(value), vector(jax.tree.map(jnp.subtract, new, args[0]))
        value, grads = run(*args)
        return float(value), vector(grads)

    def exact(self):
        source = self.source.replace("BF16", "F32").replace("F16", "F32")
        return self.outputs(self.function(source, dtype=F32), cast(self.args, F32))

    def mended(self, words, rules=None, scale=None):
        """What it returns with what a page says in words, and with rules of autocast."""
        # The carries that are drawn start in the dtype of what the loop adds.
        words = re.sub(r"start the carry in float32 for the loops? on lines? [^;]*", "", words)
        source = widened(self.source, words)
        for name in re.findall(r"dtype=jnp.float32 in (?:\w+/)*(\w+)", words):
            source = re.sub(rf'B?F16, "{name}"', f'F32, "{name}"', source)
        said = re.search(r"pass these arguments in float32: ([\w, ]+)", words)
        wide = said[1].split(", ") if said else []
        named = zip(("p", "x", "key", "a", "b", "c", "d"), self.args)
        args = [cast(arg, F32) if name in wide else arg for name, arg in named]
        if not rules and (said := re.search(r"rules=(\{.*?\})", words)):
            rules = ast.literal_eval(said[1])
        return self.outputs(self.function(source, rules), args, scale or 1.0)

    def in_bfloat16(self):
        source = re.sub(r"\bF16", "BF16", self.source)
        return self.outputs(self.function(source, dtype=BF16), cast(self.args, BF16))


@pytest.mark.cases(slow=10)
@pytest.mark.parametrize("seed", range(400))
def test_each_remedy_of_a_function_of_autocast_is_as_near_to_float32_as_the_page_says(seed):
    drawn = Function(seed)
    exact = drawn.exact()
    fun = drawn.function()
    before = error(drawn.outputs(fun), exact)
    page = doctor(fun, device=None, **({"value_and_grad_fn": None} if drawn.is_step else {}))(*drawn.args)
    shown = f"{drawn.source}{drawn.dtype} {before}\n{page}"
    of_loss = re.search(r"To mend the loss: (.+?)\. Then it is (\S+)% off", " ".join(str(page).split()))
    # The other findings of a step have laws of their own.
    kinds = ("not finite",) if drawn.is_step else ("not finite", "accuracy")
    harmful = [each for each in page.findings if each.severity in kinds]
    # Twice the error of casts by hand is no fault.
    assert before < 0.4 or harmful or of_loss or drawn.is_step, shown
    lost = page.precision.half.lost if page.precision is not None else ""
    assert not (harmful and before <= 0.08) or lost, shown

    def check(found, said):
        assert error(found, exact) <= 3 * said + 2e-3, f"{error(found, exact)} {said}\n{shown}"

    if page.nonfinite.cause is not None and harmful:
        # No rule selects a product of weights that are scaled outside of all scopes. Those of an autocast
        # inside of a step are scopes, and no paths of arguments.
        helps = any(trial.helps and not trial.dtype for trial in page.nonfinite.tried)
        assert helps or drawn.fault == "overflow" or drawn.is_step, shown
        for trial in page.nonfinite.tried:
            own = trial.change, trial.rules, trial.loss_scale
            found = drawn.in_bfloat16() if trial.dtype else drawn.mended(*own)
            if trial.helps:
                check(found, max(trial.error.loss, trial.error.gradients))
            else:
                assert not error(found, exact) <= 0.05, f"It helps: {trial}\n{shown}"
    if page.precision is not None and "To mend it" in str(page.precision):
        after = page.precision.with_rules
        check(drawn.mended(page.precision.change, page.precision.rules), max(after.loss, after.gradients))
    if of_loss:
        found = drawn.mended(of_loss[1])[0]
        assert abs(found - exact[0]) <= (0.03 * float(of_loss[2]) + 2e-3) * abs(exact[0]), shown
