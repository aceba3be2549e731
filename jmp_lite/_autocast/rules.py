"""Which operations run in which precision: the lists of autocast, as data.

The names are those of JAX's primitives, as `jax.make_jaxpr` prints them. To decide about a new primitive,
add its name to one of the sets below; a test names those that no list knows.

The lists follow PyTorch's CUDA autocast (https://pytorch.org/docs/stable/amp.html) and TensorFlow's
auto_mixed_precision_lists.h, split into the primitives of which JAX makes their operations: a layer norm is
a `reduce_sum` and an `rsqrt`, a softmax an `exp` and a `reduce_sum`, a loss a `log` or a square.
"""

import dataclasses
import difflib
import enum
import functools
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, primitives

from .._dtypes import DTypeLike, parse_dtype
from .._paths import matches

# What Tensor Cores run: half operands, accumulated in float32 by the hardware, a half result.
ALLOW = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})

# What loses range or precision in half: float32 operands and results.
DENY = frozenset(
    # Functions that leave half's range, or magnify its rounding.
    "exp exp2 expm1 log log1p log2 pow rsqrt cbrt tan asin acos atan sinh cosh asinh acosh atanh "
    "erfc erf_inv lgamma digamma polygamma zeta igamma igammac igamma_grad_a bessel_i0e bessel_i1e "
    "regularized_incomplete_beta one_minus_square polynomial "
    # Sums, within a device and across devices. `add_any` sums the gradients of a value used twice; an
    # `inner_product` is a `dot_general` without an axis of its own, which no Tensor Core runs.
    "inner_product reduce_sum reduce_prod reduce_window_sum cumsum cumprod cumlogsumexp add_any psum "
    "psum_invariant reduce_scatter".split()
)

# What leaves float16's range where a float32 program does not: the square of 256, the reciprocal of 1e-5.
# Harmless in bfloat16, whose range is that of float32. `x * x` counts as a square, `1 / x` as a reciprocal.
RANGE = frozenset({"integer_pow", "reciprocal", "square"})

# Element by element: the widest of the operands' types. An `outer_product` is a `dot_general` that sums
# nothing.
INFER = frozenset(
    "outer_product add sub mul div rem max min neg abs sign floor ceil round select_n clamp concatenate "
    "pad stack tanh logistic erf sin cos sqrt atan2 nextafter reduce_max reduce_min argmax argmin cummax "
    "cummin top_k approx_top_k is_finite eq ne lt le gt ge eq_to lt_to le_to dynamic_update_slice "
    "reduce_window_max reduce_window_min".split()
)

# Data is moved, not changed: every operand keeps the type in which it arrives.
MOVE = frozenset(
    "reshape transpose broadcast_in_dim squeeze slice dynamic_slice gather rev split tile unstack copy name "
    "stop_gradient sharding_constraint reshard layout_constraint device_put optimization_barrier sort pvary "
    "pmax pmin all_gather all_to_all ppermute".split()
)

# Left as traced, on purpose: typed functions inside, exact bits, linear algebra, keys, effects, kernels.
AS_TRACED = frozenset(
    "reduce reduce_window reduce_precision select_and_scatter select_and_scatter_add select_and_gather_add "
    "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub bitcast_convert_type iota "
    "cholesky eig eigh svd schur qr lu hessenberg householder_product triangular_solve tridiagonal "
    "tridiagonal_solve custom_linear_solve fft complex real imag conj random_gamma scaled_dot "
    "scaled_matmul".split()
)

# Operations that run jaxprs of their own: autocast goes inside.
CALLS = frozenset(
    "jit closed_call eval_jaxpr remat2 custom_jvp_call custom_vjp_call shard_map cond scan while".split()
)


# Moves whose transpose is a sum: what is in half passes through in float32, for its gradient's sake.
SPREADS = frozenset({"broadcast_in_dim", "gather", "pvary", "tile"})

# Moves between devices whose transpose is a sum: half precision goes out, gradients come back in float32.
GATHERS = frozenset({"all_gather"})

# Element-wise operations that broadcast axes of size 1; their transposes are sums as well.
BROADCASTS = frozenset("add sub mul div rem max min pow atan2 nextafter eq ne lt le gt ge".split())

# Operations whose operands may leave half's range where the result does not.
SCALES = frozenset({"mul", "div", "rem", "atan2", "outer_product"})

# Element by element, of values of one shape: what activation functions are made of.
POINTWISE = frozenset(
    "add sub mul div rem max min neg abs sign floor ceil round select_n clamp tanh logistic erf erfc sqrt "
    "rsqrt cbrt pow integer_pow square exp exp2 expm1 log log1p log2 sin cos tan asin acos atan atan2 sinh "
    "cosh asinh acosh atanh one_minus_square polynomial eq ne lt le gt ge".split()
)


class List(enum.Enum):
    """The list that decided about an operation; `move` is the part of infer that changes no value."""

    ALLOW = "allow"
    DENY = "deny"
    INFER = "infer"
    MOVE = "move"
    CALL = "call"
    AS_TRACED = "as traced"


_DEFAULTS = {
    List.ALLOW: ALLOW,
    List.DENY: DENY,
    List.INFER: INFER,
    List.MOVE: MOVE,
    List.CALL: CALLS,
    List.AS_TRACED: AS_TRACED,
}


@dataclasses.dataclass(frozen=True)
class Rules:
    """What an autocast does: its half dtype, the list of every primitive, and the exceptions by scope.

    Attributes:
        dtype: float16 or bfloat16.
        lists: the list of each primitive by name. A primitive in none keeps the dtypes it was traced with.
        scopes: pairs of a pattern over scopes and argument names, and whether it keeps float32 there; the
            first that matches wins.
    """

    dtype: np.dtype
    lists: MappingProxyType[str, List]
    scopes: tuple[tuple[str, bool], ...]

    def list_of(self, name: str) -> List:
        """Returns the list of the primitive called `name`."""
        return self.lists.get(name, List.AS_TRACED)

    def pattern_for(self, path: str) -> tuple[str, bool] | None:
        """Returns the first rule that selects the scope or argument `path`, and whether it keeps float32."""
        return next((scope for scope in self.scopes if matches(scope[0], path)), None)


def make_rules(dtype: DTypeLike, allow: Any = (), deny: Any = (), infer: Any = (), rules: Any = ()) -> Rules:
    """Reads what a user gave to `autocast`; see there.

    Raises:
        TypeError, ValueError: something is not what autocast takes.
    """
    half = parse_dtype(dtype)
    if half not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"autocast computes in float16 or bfloat16. Got dtype={half.name}.")
    lists = {name: which for which, names in _DEFAULTS.items() for name in names}
    lists |= dict.fromkeys(RANGE, List.DENY if half == jnp.float16 else List.INFER)
    given: dict[str, str] = {}
    for which, entries in ((List.ALLOW, allow), (List.DENY, deny), (List.INFER, infer)):
        for entry in _entries(which.value, entries):
            name, taken_off = _primitive_name(which.value, entry)
            if name in given:
                raise ValueError(
                    f"The operation '{name}' was given twice, in {given[name]}= and in {which.value}=."
                )
            given[name] = which.value
            if not taken_off:
                lists[name] = which
            elif lists.get(name) is which:
                lists[name] = List.AS_TRACED
            else:
                raise ValueError(
                    f"{which.value}= takes '{name}' off a list on which it is not; it is on the list "
                    f"'{lists.get(name, List.AS_TRACED).value}'."
                )
    return Rules(half, MappingProxyType(lists), _scopes(half, rules))


def _entries(option: str, entries: Any) -> Iterable[Any]:
    if isinstance(entries, (str, Primitive)):
        raise TypeError(f"{option}= is a list of operations. Got {entries!r}; write {option}=[{entries!r}].")
    return entries


def _primitive_name(option: str, entry: Any) -> tuple[str, bool]:
    """Returns the primitive that a user's entry names, and whether it is to be taken off the list."""
    if isinstance(entry, Primitive):
        name, taken_off = entry.name, False
    elif isinstance(entry, str):
        name, taken_off = entry.removeprefix("-"), entry.startswith("-")
    else:
        raise TypeError(
            f"{option}= takes primitives and their names, such as 'exp' or jax.lax.exp_p. Got {entry!r}."
        )
    if name in CALLS:
        raise ValueError(
            f"{option}= names '{name}', which runs other operations. To keep a part of the program in "
            "float32 use rules={'its scope': 'float32'} or full_precision."
        )
    if isinstance(entry, str) and name not in _known_names():
        near = difflib.get_close_matches(name, _known_names(), n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(
            f"{option}= names '{name}', which is no primitive of JAX; jax.make_jaxpr(fun)(*args) prints "
            f"theirs.{hint} Pass a primitive that JAX does not list itself, not its name."
        )
    return name, taken_off


@functools.cache
def _known_names() -> frozenset[str]:
    """The names of the primitives that JAX makes public, and of those in the lists."""
    public = {
        value.name
        for module in (primitives, jax.lax, jax.ad_checkpoint)
        for value in vars(module).values()
        if isinstance(value, Primitive)
    }
    return frozenset(public.union(*_DEFAULTS.values(), RANGE))


def _scopes(half: np.dtype, rules: Any) -> tuple[tuple[str, bool], ...]:
    pairs = rules.items() if hasattr(rules, "items") else rules
    scopes = []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(
                "rules= maps patterns over scopes to dtypes, as in {'decoder/head': 'float32'}. Got "
                f"{pair!r} as one of them."
            )
        pattern, dtype = pair[0].strip(), parse_dtype(pair[1])
        if not pattern.strip("/"):
            raise ValueError("A pattern of rules= is empty. Write a scope such as 'decoder/head'.")
        if dtype not in (jnp.float32, half):
            raise ValueError(
                f"The rule for '{pattern}' gives {dtype.name}. It may give float32, or {half.name} for an "
                "exception within a wider float32 rule; for another half dtype wrap that part in an "
                "autocast of its own."
            )
        scopes.append((pattern, dtype == jnp.float32))
    return tuple(scopes)


def fits(value: Any, half: np.dtype) -> bool:
    """Whether `half` holds the number `value`: it neither overflows, nor vanishes, nor loses over 2 %.

    >>> [fits(value, np.dtype("float16")) for value in (0.1, -np.inf, 1e-8, 1e5)]
    [True, True, False, False]
    """
    value = float(value)
    if not np.isfinite(value):
        return True
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.asarray(value, half))
    return abs(rounded - value) <= 0.02 * abs(value)
