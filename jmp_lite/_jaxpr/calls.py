"""Operations that run jaxprs: each one runs again around other bodies, built of JAX's public combinators.

A body is an inner jaxpr as a function of arrays. It returns the results of the jaxpr and its side outputs: a
dictionary of arrays, which leave the operation as further results. autocast's bodies have no side outputs;
those of the tap are its records.

To teach the library a new operation that runs jaxprs, add its row to the table in `primitives`, its operands
to `inner.inner_jaxprs`, and a function here. autocast and the tap take it from `CALLS`;
`diagnostics/_values/describe.py` says whether it is a loop.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from .bind import bind, cast
from .inner import inner_jaxprs
from .read import Array, Equation, Jaxpr, constants, open_jaxpr, without_constants
from .scopes import is_differentiated

Side: TypeAlias = dict[Any, Array]
"""The side outputs of a body."""

Outputs: TypeAlias = tuple[list[Array], Side]
"""Results, and side outputs."""

# The constants of a loop are no arguments of its bodies: bodies close over them, so that a cast of a constant
# stands in front of the loop.
Body: TypeAlias = Callable[..., Outputs]
"""An inner jaxpr as a function of arrays, that returns its results and its side outputs."""


class Accumulator(Protocol):
    """Joins the side outputs of the iterations of a loop."""

    start: Any  # The state before the first iteration.

    def add(self, state: Any, side: Side) -> Any:
        """Returns the state after an iteration with these side outputs."""
        ...

    def side(self, state: Any) -> Side:
        """Returns the side outputs of the whole loop."""
        ...


def jit(equation: Equation, bodies: Sequence[Body], arrays: Sequence[Array]) -> Outputs:
    """Runs a jitted function, with its shardings. There are no side outputs."""
    # It stays a jitted function: inlined, a deep model is traced three times slower. The same body, of
    # several calls, is traced once, since `jax.make_jaxpr` traces by `jax.jit`:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/api.py#L1957.
    return bind(equation, arrays, jaxpr=_traced(bodies[0], arrays)), {}


def composite(equation: Equation, bodies: Sequence[Body], arrays: Sequence[Array]) -> Outputs:
    """Runs a composite operation, with its name and attributes. There are no side outputs."""
    param = "jaxpr" if "jaxpr" in equation.params else "call_jaxpr"  # Its name since JAX 0.12.
    return bind(equation, arrays, **{param: _traced(bodies[0], arrays)}), {}


def linear_solve(equation: Equation, bodies: Sequence[Body], arrays: Sequence[Array]) -> Outputs:
    """Runs a linear solve. Its bodies are the matrices and the solvers. There are no side outputs."""
    # The derivative of a solve multiplies by the matrix, and so runs a jaxpr that the solve itself does not:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/control_flow/solves.py#L385.
    closed = iter(
        _traced(body, [arrays[index] for index in inner.operands])
        for body, inner in zip(bodies, inner_jaxprs(equation))
    )
    # A named tuple, in which a solve without a transpose has None.
    jaxprs = equation.params["jaxprs"]
    jaxprs = type(jaxprs)(*(None if jaxpr is None else next(closed) for jaxpr in jaxprs))
    return bind(equation, arrays, jaxprs=jaxprs), {}


def _traced(body: Body, arrays: Sequence[Array]) -> Jaxpr:
    return jax.make_jaxpr(body)(*arrays)


def remat(equation: Equation, bodies: Sequence[Body], arrays: Sequence[Array]) -> Outputs:
    """Runs a `jax.checkpoint`, with the user's policy."""
    (body,), params = bodies, equation.params
    if not is_differentiated(equation):
        return jax.checkpoint(body, policy=params["policy"], prevent_cse=_prevent_cse(equation))(*arrays)
    # `jax.grad` has made this equation. `jax.checkpoint` would begin anew, without its barriers, which JAX
    # gives to differentiated equations alone
    # (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/ad_checkpoint.py#L885), and would save what
    # must be recomputed.
    closed, shapes = jax.make_jaxpr(body, return_shape=True)(*arrays)
    results = bind(equation, [*constants(closed), *arrays], jaxpr=without_constants(closed))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _prevent_cse(equation: Equation) -> bool:
    """Whether a `jax.checkpoint` keeps XLA from merging the recomputation with the forward pass."""
    # JAX may have one boolean for each operand. Under autocast a body can take others, in another order, so
    # that all of them are guarded if one is: the results are the same.
    given = equation.params["prevent_cse"]
    return any(given) if isinstance(given, tuple) else given


def remat_from_half(
    equation: Equation, body: Body, primal: Body, kept: Sequence[int], half: Any
) -> Callable[..., list[Array]]:
    """Returns a rematerialized function that keeps some operands in `half` for its backward pass.

    JAX traces and differentiates it once for all calls.

    Args:
        equation: a `remat2` without a policy.
        body: the function, without side outputs.
        primal: the same function where no derivative is taken.
        kept: the indexes of the float32 operands to keep in half.
        half: the half dtype.
    """
    remat = functools.partial(jax.checkpoint, prevent_cse=_prevent_cse(equation))
    # The forward pass reads the operands as they are. Without this `jax.checkpoint`, and those of the regions
    # inside, a loop would compute in front of it what no iteration changes, such as the fill of a causal
    # mask: in float32, as large as all scores (https://github.com/jax-ml/jax/pull/1664).
    forward = jax.checkpoint(primal, prevent_cse=False)

    # The backward pass computes the function again from the half copies.
    @functools.cache
    def recomputation(moving: tuple[int, ...], moves: tuple[bool, ...]) -> Callable[..., list[Array]]:
        return remat(functools.partial(_changes_from_half, body, kept, moving, moves))

    @jax.custom_jvp
    def run(*arrays: Array) -> list[Array]:
        return remat(body)(*arrays)[0]

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        results = forward(*primals)[0]
        moving = tuple(index for index, x in enumerate(tangents) if not isinstance(x, SymbolicZero))
        moves = tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in results)  # Integers have no tangents.
        copies = [cast(x, half) if index in kept else x for index, x in enumerate(primals)]
        changes = iter(recomputation(moving, moves)(copies, [tangents[index] for index in moving]))

        def zero(x):
            return np.zeros(x.shape, jax.dtypes.float0)

        return results, [next(changes) if each else zero(x) for x, each in zip(results, moves)]

    # Otherwise the operands without a tangent, such as integers, would get zeros, and the derivatives with
    # respect to them would be computed too (https://github.com/jax-ml/jax/issues/11208).
    run.defjvp(rule, symbolic_zeros=True)
    return run


def _changes_from_half(
    body: Body,
    kept: Sequence[int],
    moving: Sequence[int],
    moves: Sequence[bool],
    copies: list[Array],
    directions: list[Array],
) -> list[Array]:
    """Returns the tangents of the results that have any, from the copies of the operands.

    `directions` are the tangents of the operands at the indexes `moving`.
    """
    operands = [cast(x, jnp.float32) if index in kept else x for index, x in enumerate(copies)]

    # A function of the perturbed operands alone: zeros for the others would be instantiated.
    def of_moving(*moved: Array) -> list[Array]:
        given = dict(zip(moving, moved))
        new = body(*(given.get(index, x) for index, x in enumerate(operands)))[0]
        return [x for x, each in zip(new, moves) if each]

    return jax.jvp(of_moving, [operands[index] for index in moving], directions)[1]


def shard_map(equation: Equation, bodies: Sequence[Body], arrays: Sequence[Array]) -> Outputs:
    """Each shard gives side outputs of its own: they get one more axis in front, with an index a shard."""
    (body,), params = bodies, equation.params
    mesh, manual = params["mesh"], params["newly_manual_axes"]

    def shard(*arrays: Array) -> Outputs:
        results, side = body(*arrays)
        return results, {key: array[None] for key, array in side.items()}

    axes = tuple(name for name in mesh.axis_names if name in manual)
    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
        axis_names=manual,
        check_vma=params["check_vma"],
    )(*arrays)


def cond(
    equation: Equation, bodies: Sequence[Body], arrays: Sequence[Array], skipped: Side | None = None
) -> Outputs:
    """Runs a branch. `skipped` has the side outputs of a branch that is not taken."""
    index, *operands = arrays

    # JAX wants the same structure of all branches, so each one gives the side outputs of the others too.
    def complete(body: Body) -> Body:
        def branch(*arrays: Array) -> Outputs:
            results, side = body(*arrays)
            return results, (skipped or {}) | side

        return branch

    branches = [complete(body) for body in bodies]
    # Of `lax.platform_dependent`, whose index JAX finds out when it compiles for a platform:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/control_flow/conditionals.py#L958.
    if platforms := equation.params.get("branches_platforms"):  # None is the default.
        pairs = zip(platforms, branches)
        named = {name: branch for names, branch in pairs for name in names or ["default"]}
        return lax.platform_dependent(*operands, **named)
    return lax.switch(index, branches, *operands)


def scan(
    equation: Equation,
    bodies: Sequence[Body],
    arrays: Sequence[Array],
    accumulator: Accumulator | None = None,
) -> Outputs:
    """Runs a scan, whose body takes carries and slices, and gives carries and results to stack.

    The side outputs of all iterations are stacked too, or an accumulator joins them.
    """
    (body,), (inner,) = bodies, inner_jaxprs(equation)
    # The operands are constants, which the body closes over, then carries, then arrays to slice.
    operands = list(arrays[inner.constants :])
    first_carries, sliced = operands[: inner.carried], operands[inner.carried :]
    start = first_carries, {} if accumulator is None else accumulator.start

    def step(state: tuple[list[Array], Any], slices: list[Array]) -> tuple[Any, Outputs]:
        carries, joined = state
        results, side = body(*carries, *slices)
        if accumulator is not None:
            joined, side = accumulator.add(joined, side), {}
        return (results[: inner.carried], joined), (results[inner.carried :], side)

    # A symbolic length, of `jax.export`, is known by the slices alone.
    length = None if sliced else equation.params["length"]
    reverse, unroll = equation.params["reverse"], equation.params["unroll"]
    (carries, joined), (stacked, side) = lax.scan(step, start, sliced, length, reverse=reverse, unroll=unroll)
    return [*carries, *stacked], side if accumulator is None else accumulator.side(joined)


def while_loop(
    equation: Equation,
    bodies: Sequence[Body],
    arrays: Sequence[Array],
    accumulator: Accumulator | None = None,
    most: int | None = None,
) -> Outputs:
    """Runs a loop, at most `most` iterations if that is given. An accumulator joins the side outputs."""
    # The number of iterations is not known, so side outputs cannot be stacked.
    condition, body = bodies
    parts = inner_jaxprs(equation)
    (predicate,) = open_jaxpr(parts[0].jaxpr).outvars

    def goes_on(carry):
        return condition(*carry)[0][0]

    def step(state: Any) -> Any:
        carry, total, count = state
        # jax.vmap gives a loop a predicate for each example. JAX stops each example on its own when it
        # compiles the primitive, but lax.while_loop takes one predicate. JAX makes the same of it:
        # https://github.com/jax-ml/jax/pull/20726.
        masks = goes_on(carry) if predicate.aval.ndim else None
        results, side = body(*carry)
        if masks is not None:
            results = [_where(masks, new, old) for new, old in zip(results, carry)]
        total = total if accumulator is None else accumulator.add(total, side)
        return results, total, None if most is None else count + 1

    def any_goes_on(state: Any) -> Array:
        masks = goes_on(state[0])
        masks = masks.any() if predicate.aval.ndim else masks
        return masks if most is None else masks & (state[2] < most)

    start = list(arrays[sum(part.constants for part in parts) :])
    count = None if most is None else jnp.int32(0)
    nothing = {} if accumulator is None else accumulator.start
    carry, total, _ = lax.while_loop(any_goes_on, step, (start, nothing, count))
    return carry, {} if accumulator is None else accumulator.side(total)


def _where(masks: Array, new: Array, old: Array) -> Array:
    """Returns `new` for the examples whose mask is true, and `old` for the others."""
    # The examples are the first axes, in which `jax.vmap` puts them.
    return jnp.where(masks.reshape(masks.shape + (1,) * (old.ndim - masks.ndim)), new, old)


CALLS: dict[str, Callable[..., Outputs]] = {
    "composite": composite,
    "cond": cond,
    "custom_linear_solve": linear_solve,
    "jit": jit,
    "remat2": remat,
    "scan": scan,
    "shard_map": shard_map,
    "while": while_loop,
}
"""For each operation the function that runs it. Arguments: the equation, a body for each of its jaxprs in the
order of `inner.inner_jaxprs`, and an array for each of its operands."""
