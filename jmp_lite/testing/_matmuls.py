"""Assertions about the matmuls of a function and of a compiled program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._autocast.report import AutocastOperation, explain
from .._dtypes import DTypeLike, parse_dtype
from .._paths import as_patterns, matches, shown
from .._text import shortened
from ..programs._program import Program
from ..programs._read import read_program


def assert_precision(
    fun: Callable[..., Any], dtypes: Mapping[str, DTypeLike], /, *args: Any, **kwargs: Any
) -> None:
    """Asserts in which dtype every matmul of a function runs.

    It traces `fun` and computes nothing. It reads the matmuls as they run, under `autocast`, a policy or
    casts by hand, and in the gradients of all these.

    Args:
        fun: any function that JAX can trace: a loss, `jax.grad(autocast(loss_fn))`, a train step.
        dtypes: a dtype for each pattern over scopes and argument paths, as in the `rules` of `autocast`. The
            first pattern that matches a matmul decides. The dtype of a matmul is that of its operands. The
            matmul that makes the gradient of a weight does not take the weight, so select it by its scope.
        args: the arguments of `fun`. A `jax.ShapeDtypeStruct` may stand for an array.
        kwargs: those that it takes by name.

    Raises:
        AssertionError: a matmul runs in another dtype, or no pattern matches it, or a pattern
            decides about no matmul. The message lists each matmul with its dtypes, scope, line and reason.
        ValueError, TypeError: `dtypes` is not a mapping of patterns to dtypes, or is empty; or the arguments
            are not those of `fun`.

    Examples:
        >>> def loss(w, x):
        ...     with jax.named_scope("head"):
        ...         return jnp.mean(x @ w)
        >>> half_loss = jmp.autocast(loss, jnp.bfloat16)
        >>> w, x = jnp.ones((4, 8)), jnp.ones((2, 4))
        >>> assert_precision(jax.grad(half_loss), {"**/head": "bfloat16"}, w, x)
    """
    if not isinstance(dtypes, Mapping) or not dtypes:
        raise TypeError(
            "assert_precision(fun, dtypes, *args) takes a mapping of patterns to dtypes, such as "
            f"{{'**/router': 'float32', '**': 'bfloat16'}}. Got {shown(dtypes)}."
        )
    as_patterns(tuple(dtypes), "assert_precision: dtypes has patterns over scopes and argument paths")
    wanted = {pattern: parse_dtype(dtype).name for pattern, dtype in dtypes.items()}
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except ValueError:  # Some built-in functions have no signature.
        pass
    except TypeError as error:  # Of `bind`: the arguments are not those of `fun`.
        raise TypeError(
            f"assert_precision(fun, dtypes, *args, **kwargs) traces fun with its arguments: {error}."
        ) from None
    _check([row for row in _report(fun, args, kwargs) if row.is_product], wanted)


def _check(matmuls: Sequence[AutocastOperation], wanted: Mapping[str, str]) -> None:
    """Raises an AssertionError if a matmul is not in the dtype of the first pattern that matches it."""

    def selects(pattern, row):
        return any(matches(pattern, path) for path in (row.scope, *row.arguments))

    used = [next((p for p in wanted if selects(p, matmul)), None) for matmul in matmuls]
    faults = (_fault(matmul, pattern, wanted) for matmul, pattern in zip(matmuls, used))
    wrong = list(filter(None, faults))
    unused = [f"the pattern '{p}' decides about no matmul." for p in wanted if p not in used]
    if unused:
        scopes = ", ".join(sorted({matmul.module or "/" for matmul in matmuls})) or "none"
        unused.append(f"The modules with matmuls are: {scopes}.")
    if wrong or unused:
        summary = f"{len(wrong)} of {len(matmuls)} matmuls are not as asserted"
        raise failure("assert_precision", summary, [*wrong, *unused])


def _fault(matmul: AutocastOperation, pattern: str | None, wanted: Mapping[str, str]) -> str:
    """Returns in which way a matmul is not in the dtype of its pattern; empty if it is."""
    dtype = " x ".join(dict.fromkeys(operand.dtype.name for operand in matmul.operands[:2]))
    if pattern is None:
        return f"{dtype}; no pattern matches it: {_described(matmul)}"
    if dtype == wanted[pattern]:
        return ""
    return f"{dtype}, not the {wanted[pattern]} of '{pattern}': {_described(matmul)}"


def _report(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[AutocastOperation]:
    """Returns the operations of `fun` as they run, under the names of its arguments."""

    def as_it_runs(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    # `explain` names arguments by the signature. With the attributes of `fun` it would explain its autocast.
    as_it_runs.__wrapped__ = fun  # type: ignore[attr-defined]
    return explain(as_it_runs, "float32")(*args, **kwargs).operations


def _described(matmul: AutocastOperation) -> str:
    operands = f"{' '.join(matmul.inputs)} -> {' '.join(matmul.outputs)}"
    where = f"in {matmul.module or '/'}, {shortened(matmul.source)}"
    return f"{matmul.name} {operands}\n    {where}\n    {matmul.reason}"


def assert_tensor_cores(compiled: Any, share: float = 0.99) -> None:
    """Asserts that Tensor Cores run most of the matmuls of a compiled program, in 16 bits or less.

    Args:
        compiled: a compiled step, `jax.jit(step).lower(...).compile()` on an NVIDIA GPU, or
            `programs.compile_for("h100", step, ...)` anywhere; or its `Program`.
        share: the smallest share of the FLOPs of all matmuls, from 0 to 1.

    Raises:
        AssertionError: the share is smaller. The message lists the matmuls that Tensor Cores do not run, or
            run in TF32, those with most FLOPs first. A program without matmuls fails, too.
        ValueError: the program is not one for an NVIDIA GPU, or `share` is not in 0 to 1.

    Examples:
        ```python
        x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        step = jax.jit(jmp.autocast(lambda x: jnp.tanh(x @ x), jnp.float16))
        assert_tensor_cores(compile_for("h100", step, x))
        ```
    """
    program = compiled if isinstance(compiled, Program) else read_program(compiled)
    if not 0 < share <= 1:
        raise ValueError(f"assert_tensor_cores: share is above 0 and at most 1. Got {share!r}.")
    if "cpu" in program.device.lower() or "tpu" in program.device.lower():
        raise ValueError(
            f"assert_tensor_cores takes a program for an NVIDIA GPU. Got one for {program.device}. "
            "jmp_lite.programs.compile_for('h100', step, *args) compiles one on any machine."
        )
    if not program.matmuls:
        raise failure("assert_tensor_cores", "the program has no matmuls")
    if program.tensor_core_share < share:

        def flops(matmul):
            return matmul.flops * matmul.times

        def is_other(matmul):
            return not matmul.on_tensor_cores or matmul.arithmetic.startswith("tf32")

        others = sorted(filter(is_other, program.matmuls), key=flops, reverse=True)
        total = sum(map(flops, program.matmuls))
        lines = [
            f"{flops(matmul) / total:.1%} of the FLOPs: {matmul.kind} in {matmul.arithmetic}, "
            f"{' '.join(map(str, matmul.operands))}, {matmul.operation}"
            for matmul in others
        ]
        summary = f"{program.tensor_core_share:.1%} of the FLOPs are on Tensor Cores in half, not {share:.1%}"
        raise failure("assert_tensor_cores", summary, lines)


def failure(assertion: str, summary: str, lines: Sequence[str] = ()) -> AssertionError:
    """Returns an error whose message has the form of chex's."""
    listed = "".join(f"\n- {line}" for line in lines)
    return AssertionError(f"[jmp_lite] Assertion {assertion} failed: {summary}.{listed}")
