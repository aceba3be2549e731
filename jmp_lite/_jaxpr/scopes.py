"""Reads and writes the name stacks of equations: scopes, modules, and the transforms that JAX notes there.

JAX documents none of the names that it writes itself: `jvp(`, `transpose(` and `rematted_computation`.
"""

import contextlib
import functools
import re
import urllib.parse
from collections.abc import Iterator, Set
from typing import Any

from jax.extend import source_info_util

from .._paths import RECOMPUTED, join, plain_scope
from .read import Equation

# Scopes that survive every transform of JAX (https://github.com/jax-ml/jax/pull/8395), and `jax.jit`. They
# tell autocast where it keeps out.
AUTOCAST_SCOPE = "jmp_lite.autocast"
FULL_PRECISION_SCOPE = "jmp_lite.full_precision"
SOLVER_SCOPE = "jmp_lite.solver"
FUSED_SCOPE = "jmp_lite.fused_attention"
# What autocast leaves in float32 has such a name with the reason, for a report of the step around it.
_REASON, _IN_REASONS = "jmp_lite.float32.", " ',:*?[]"
# Such a name, with the numbers of flags, tells `compare_precision` the modules of an equation. The equations
# that JAX makes of its derivative have it as well.
_FLAGS = re.compile(r"/?jmp_lite\.flags((?:\.\d+)+)")


def scope_of(equation: Equation, around: str = "") -> str:
    """Returns the named scopes and Flax modules around an equation, joined by slashes.

    The names of transforms are left out: `transpose(jvp(decoder))/head` is `decoder/head`. So are those that
    JAX adds to what `jax.checkpoint` computes again: its scope is that of the forward pass.
    """
    scope = _scope_of_stack(equation.source_info.name_stack)
    if equation.primitive.name == "remat2" and is_differentiated(equation):
        # JAX writes its scope twice, `transpose(jvp(decoder))/jvp(decoder)`: that of the backward pass, in
        # which it is evaluated, and its own.
        names = scope.split("/")
        once = names[: len(names) // 2]
        scope = "/".join(once) if names == once * 2 else scope
    return join(around, scope) if scope else around


@functools.lru_cache(maxsize=4096)  # The operations of a layer share a few stacks.
def _scope_of_stack(name_stack: Any) -> str:
    return plain_scope(_FLAGS.sub("", str(name_stack)))


@functools.lru_cache(maxsize=4096)
def _is_in_stack(name: str, name_stack: Any) -> bool:
    return name in str(name_stack)


def reason_scope(why: str, reason: str) -> str:
    """Returns a scope that says why autocast has left an operation in float32: the kind, and in words."""
    # Slashes separate scopes, and JAX writes parentheses around them.
    return f"{_REASON}{why}: {urllib.parse.quote(reason, safe=_IN_REASONS)}"


def reason_of_scope(scope: str) -> tuple[str, str]:
    """Returns what `reason_scope` has written into the scope of an operation; empty for nothing."""
    found = (name.removeprefix(_REASON) for name in scope.split("/") if name.startswith(_REASON))
    why, _, reason = next(found, "").partition(": ")
    return why, urllib.parse.unquote(reason)


def is_by_autocast(equation: Equation) -> bool:
    """Whether an equation was made by a function that autocast returned."""
    return _is_in_stack(AUTOCAST_SCOPE, equation.source_info.name_stack)


@contextlib.contextmanager
def context_of(equation: Equation) -> Iterator[None]:
    """Gives operations that run inside it the scopes, source line, mesh and metadata of `equation`."""
    # As JAX's own `eval_jaxpr` does: https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/core.py#L791.
    source = equation.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=stack), equation.ctx.manager:
        yield


def flagged(equation: Equation, flags: Set[int]) -> Equation:
    """Returns an equation with the numbers of flags in its name stack, where every transform keeps them."""
    # A field of ours would be lost in the first `jax.grad`.
    source = equation.source_info
    return equation.replace(
        source_info=source.replace(name_stack=source.name_stack.extend(flag_scope(flags)))
    )


def flag_scope(flags: Set[int]) -> str:
    """Returns the name of the scope that gives the operations inside it the numbers of flags."""
    return ".".join(["jmp_lite.flags", *map(str, sorted(flags))])


def flags_of(equation: Equation) -> frozenset[int] | None:
    """Returns the numbers that `flagged` has written; None if it has written none."""
    return _flags_in_stack(equation.source_info.name_stack)


@functools.lru_cache(maxsize=4096)
def _flags_in_stack(name_stack: Any) -> frozenset[int] | None:
    found = _FLAGS.findall(str(name_stack))
    # The innermost flags are the last ones.
    return frozenset(map(int, found[-1][1:].split("."))) if found else None


def is_transposed(equation: Equation) -> bool:
    """Whether JAX made an equation for a backward pass."""
    # Written at https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/interpreters/ad.py#L396.
    return _is_in_stack("transpose(", equation.source_info.name_stack)


def is_of_gradient(equation: Equation) -> bool:
    """Whether the program took a derivative of an equation, so that it has the backward pass too."""
    # Written at https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/interpreters/ad.py#L63 and #L306.
    return _is_in_stack("jvp(", equation.source_info.name_stack)


def is_recomputed(equation: Equation) -> bool:
    """Whether an equation of a backward pass computes a part of the forward pass again."""
    # Written at https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/ad_checkpoint.py#L809.
    return _is_in_stack(RECOMPUTED, equation.source_info.name_stack)


def is_differentiated(equation: Equation) -> bool:
    """Whether `jax.grad` has made a `remat2`, which computes a part of the forward pass again."""
    # Set at https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/ad_checkpoint.py#L674.
    return equation.params["differentiated"]


def call_scope(scope: str, equation: Equation) -> str:
    """Returns the scope inside a call: the name of a jitted function is a scope."""
    name = equation.params.get("name")
    return join(scope, name) if isinstance(name, str) else scope
