"""The cases of the laws: a program, what flows beside it, options, a way to run, and a frozen operand."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import jmp_lite as jmp
from tests.laws.programs import BATCH, PROGRAMS, WIDTH, body

# What flows beside the float32 values. Each flow takes its values `z`, the data and a float32 activation `h`
# with the shape of the data. It returns values that depend on the data alone, which must keep their bits, and
# a float32 loss.


def _halves(z, d, h):
    own = z + z * z.dtype.type(3)
    return [own, jax.nn.gelu(own), jnp.tanh(own @ own.T)], ((own + own).astype(jnp.float32) * h).mean()


def _doubles(z, d, h):
    own = z + jnp.cumsum(z * 3, axis=0)
    return [own, own @ own.T, jnp.where(z > 0, own, z)], ((z + h).mean()).astype(jnp.float32)


def _complex(z, d, h):
    own = z + z * 3j
    return [own, own + jnp.conj(z), jnp.abs(own)], jnp.real(own + lax.complex(h, h) * z).mean()


def _integers(z, d, h):
    i, table = d["y"][0] % 2, jnp.arange(4 * WIDTH, dtype=jnp.float32).reshape(-1, WIDTH)
    indices = jnp.arange(BATCH) + z[:, 0] % 2
    cache = table.at[indices + indices].set(0.5)
    rows = lax.dynamic_slice(h, (i + i, jnp.int32(0)), (2, WIDTH))
    return [z + z, table[indices + indices // 2], cache, (z + z) % 3], rows.mean() + h[indices % BATCH].mean()


def _booleans(z, d, h):
    mask = z & (d["x"] > 0)
    return [mask, z | mask, jnp.cumsum(mask + mask, axis=0)], jnp.where(mask, h, 0.0).mean()


def _keys(z, d, h):
    keys = jax.random.split(z, 2)
    noise = jax.random.normal(keys[0], h.shape)
    return [keys, jax.random.key_data(keys)], (jax.random.uniform(keys[1]) * h * noise).mean()


def _float8(z, d, h):
    wide = z.astype(jnp.float32)
    return [z, jnp.where(d["x"] > 0, z, z), z.astype(jnp.bfloat16) * 2], (wide * h).mean()


_random = np.random.default_rng(5)
_numbers = _random.normal(size=(BATCH, WIDTH))

BESIDE: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "float16": (lambda: jnp.asarray(_numbers, jnp.float16), _halves),
    "bfloat16": (lambda: jnp.asarray(_numbers, jnp.bfloat16), _halves),
    "float64": (lambda: jnp.asarray(_numbers, jnp.float64), _doubles),
    "complex64": (lambda: jnp.asarray(_numbers + 1j * _numbers[::-1], jnp.complex64), _complex),
    "int32": (lambda: jnp.asarray(_numbers > 0, jnp.int32), _integers),
    "bool": (lambda: jnp.asarray(_numbers > 0), _booleans),
    "key": (lambda: jax.random.key(3), _keys),
    "float8_e4m3fn": (lambda: jnp.asarray(_numbers, jnp.float8_e4m3fn), _float8),
}

# For each parameter of `autocast`, the values that cases draw. A test compares the names with its signature.
OPTIONS: dict[str, list[Any]] = {
    "fun": [],
    "dtype": ["float16", "bfloat16", "float8"],
    "allow": [["tanh"], ["exp"], ["mul"], ["gather"], ["-dot_general"]],
    "deny": [["tanh"], ["add"], ["dot_general"], ["-exp"], ["select_n", "max"]],
    "infer": [["exp", "reduce_sum", "reduce_max"], ["integer_pow", "square"], ["log"], ["-add"]],
    "rules": [
        {"body": "float32"},
        {"head": "float32"},
        {"body": "half", "**": "float32"},
        {"p/w": "float32"},
        [("d/*", "float32")],
        {"p/w": "half", "p/*": "float32"},
    ],
    "reduce_dtype": ["float32"],
    "float32_results": ["**", "head", "p/w"],
    "half_sums": ["**", "body"],
}
# The scopes of ours that a program may have around a part of it.
SCOPES = {
    "none": lambda fun: fun,
    "full_precision": jmp.full_precision,
    "autocast": lambda fun: jmp.autocast(fun, "bfloat16"),
    "autocast to float32": lambda fun: jmp.autocast(fun, "float32"),
    "fuse_attention": lambda fun: jmp.fuse_attention(fun, "bfloat16", implementation="xla"),
}


def _vmapped(fun):
    def vmapped(p, d):
        losses, kept = jax.vmap(fun, (None, 0))(p, _twice(d))
        return losses.mean(0), kept

    return vmapped


def _scanned(fun):
    def scanned(p, d):
        def step(total, d):
            loss, kept = fun(p, d)
            return (total + loss / 2).astype(jnp.float32), kept

        return lax.scan(step, jnp.float32(0), _twice(d))

    return scanned


def _twice(tree):
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


WAYS: dict[str, Callable[..., Any]] = {
    "plain": lambda fun: fun,
    "jit": jax.jit,
    "vmap": _vmapped,
    "scan": _scanned,
    "remat": jax.checkpoint,
}
ORDERS = ["grad(autocast)", "autocast(grad)"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One case, as Hypothesis prints it."""

    program: str
    beside: str
    scope: str
    options: tuple[tuple[str, Any], ...]
    way: str
    frozen: str  # The name of a parameter that is not differentiated; empty for none.

    @property
    def half(self) -> str:
        dtype = dict(self.options).get("dtype", "bfloat16")
        return "bfloat16" if dtype == "float8" else dtype

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of `autocast`."""
        settings = dict(self.options)
        if "rules" in settings:
            rules = settings["rules"]
            pairs = rules.items() if isinstance(rules, dict) else rules
            settings["rules"] = [(k, self.half if v == "half" else v) for k, v in pairs]
        return settings

    def arguments(self, seed: int = 0) -> tuple[Any, Any]:
        """The parameters and the data. The data has what flows beside the program as `z`."""
        params, data = PROGRAMS[self.program].arguments(seed)
        if self.beside:
            data["z"] = BESIDE[self.beside][0]()
        return params, data

    def fun(self, p: Any, d: Any) -> tuple[jax.Array, list[Any]]:
        """The program: its loss, and what depends on the data alone."""
        loss = SCOPES[self.scope](PROGRAMS[self.program].loss)(p, d)
        if not self.beside:
            return loss, []
        weight = next(p[name] for name in sorted(p) if p[name].shape == (WIDTH, WIDTH))
        with body():
            kept, more = BESIDE[self.beside][1](d["z"], d, d["x"] @ weight)
        return loss + 0.1 * more, kept

    def autocast(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        return jmp.autocast(fun, **self.settings)

    def value_and_grad(self, order: str, cast: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The loss, what is kept, and the gradients of the parameters that are differentiated.

        `cast` stands for autocast; by default it is the autocast of the case.
        """
        cast, run = cast or self.autocast, WAYS[self.way]

        def gradients(fun):
            def of_moving(p, d):
                fixed = {name: x for name, x in p.items() if name == self.frozen}
                moving = {name: x for name, x in p.items() if name != self.frozen}
                return jax.value_and_grad(lambda m: run(fun)(fixed | m, d), has_aux=True)(moving)

            return of_moving

        return gradients(cast(self.fun)) if order == ORDERS[0] else cast(gradients(self.fun))

    @property
    def context(self) -> Any:
        """The context in which the case runs: float64 needs `jax.enable_x64`."""
        is_wide = self.beside == "float64"
        return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def options(most: int = 2) -> st.SearchStrategy[Any]:
    """Draws a half dtype and up to `most` other options."""
    dtypes = st.sampled_from(OPTIONS["dtype"]).map(lambda dtype: (("dtype", dtype),))
    others = [(name, value) for name in OPTIONS if name not in ("fun", "dtype") for value in OPTIONS[name]]
    drawn = st.lists(st.sampled_from(others), max_size=most, unique_by=lambda option: option[0])
    return st.builds(lambda first, more: (*first, *more), dtypes, drawn)


def cases(program: str, **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Case]:
    """Draws cases of a program, the simplest first. `fixed` gives strategies for some of their fields."""
    fields = {
        "program": st.just(program),
        "beside": st.sampled_from(["", *BESIDE]),
        "scope": st.sampled_from(list(SCOPES)),
        "options": options(),
        "way": st.sampled_from(list(WAYS)),
        "frozen": st.sampled_from(["", *PROGRAMS[program].arguments(0)[0]]),
        **fixed,
    }
    return st.builds(Case, **fields)
