"""Why a product of the program is in float32, and which sizes Tensor Cores run slowly.

This reads the program as it was traced, before autocast changes it.
"""

import dataclasses
import itertools
import linecache
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from ..._dtypes import HALF_DTYPES
from ..._jaxpr import lines, read
from ..._jaxpr.inner import Inner, inner_jaxprs
from ..._jaxpr.primitives import Category, traits_of
from ..._jaxpr.read import Equation, Jaxpr, Var
from ..planning.states import State


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Why a value is in float32."""

    text: str  # The reason.
    widened: bool = False  # Whether the program cast it from half to float32.
    promoted: bool = False  # Whether a float32 operand promoted it to float32.


def find_promotions(jaxpr: Jaxpr, names: Sequence[str]) -> dict[int, str]:
    """Returns why products are in float32, by the `id` of their equations."""
    inside = read.open_jaxpr(jaxpr)
    reasons: dict[int, str] = {}
    origins = {
        var: _Origin(f"{name or 'an argument'} is float32")
        for var, name in zip(inside.invars, names, strict=True)
        if read.is_float32(var)
    }
    _follow(inside, origins, reasons)
    return reasons


def _follow(
    inside: Jaxpr, origins: dict[Var, _Origin], reasons: dict[int, str], call: Equation | None = None
) -> None:
    """Adds the reasons of the products of an open jaxpr. `call` runs it, in a line of the user's."""
    for var in inside.constvars:
        if read.is_float32(var):
            origins.setdefault(var, _Origin(f"a constant {read.describe(var.aval)} is float32"))
    for equation in read.equations(inside):
        category = traits_of(equation.primitive.name).category
        if category is Category.CALL:
            for inner in inner_jaxprs(equation):
                _follow_call(equation, inner, origins, reasons, call)
            continue
        taken = [origins[var] for var in equation.invars if not read.is_literal(var) and var in origins]
        origin = _origin_of_result(equation, taken, call)
        if origin is not None:
            if category is Category.ALLOW:
                reasons[id(equation)] = f"float32 since {origin.text}"
            origins.update(dict.fromkeys(filter(read.is_float32, equation.outvars), origin))


def _follow_call(
    equation: Equation,
    inner: Inner,
    origins: dict[Var, _Origin],
    reasons: dict[int, str],
    call: Equation | None,
) -> None:
    inside = read.open_jaxpr(inner.jaxpr)
    entering = [_origin_of_operand(equation.invars[index], origins) for index in inner.operands]
    known = {var: origin for var, origin in zip(inside.invars, entering) if origin is not None}
    # The operations of a jitted function of JAX's, such as `jnp.where`, have no line of the user's.
    _follow(inside, known, reasons, equation if lines.users_line(equation) else call)
    for var, index in zip(inside.outvars, inner.results):
        if index is not None and (origin := _origin_of_operand(var, known)):
            origins[equation.outvars[index]] = origin


def _origin_of_operand(var: Var, origins: Mapping[Var, _Origin]) -> _Origin | None:
    """Returns why an operand of a call is in float32."""
    if not read.is_literal(var):
        return origins.get(var)
    # Unlike a Python number, which is weakly typed, a float32 scalar promotes half operands, such as
    # `np.float32(-1e9)` in `jnp.where`: https://docs.jax.dev/en/latest/type_promotion.html.
    if not read.is_float32(var) or var.aval.weak_type:
        return None
    return _Origin(f"the constant {float(var.val):g} is float32")


def _origin_of_result(equation: Equation, taken: Sequence[_Origin], call: Equation | None) -> _Origin | None:
    """Returns why an operation gives float32. `taken` says why its operands are in float32."""
    if equation.primitive.name == "convert_element_type":
        (source,) = equation.invars
        if not read.is_literal(source) and source.aval.dtype in HALF_DTYPES:
            return _Origin(f"the program casts to float32, {_line(equation, call)}", widened=True)
        return taken[0] if taken else None
    # Half values that the program widened, beside ones that were float32 from the start, which promote them.
    promoted = [origin for origin in taken if origin.promoted]
    if promoted or not taken:
        return promoted[0] if promoted else None
    widened = [origin for origin in taken if origin.widened]
    own = [origin for origin in taken if not origin.widened]
    if not (widened and own):
        return taken[0]
    return _Origin(f"{own[0].text}, {_line(equation, call)}", promoted=True)


def _line(equation: Equation, call: Equation | None) -> str:
    """Returns the source line of an equation, or of the call around it, with its code if it can be read."""
    line = lines.users_line(equation) or (lines.users_line(call) if call is not None else "")
    match = re.match(r"(.*?):(\d+)", line)
    code = linecache.getline(match[1], int(match[2])).strip() if match else ""
    return f"{line}: {code}" if code else line


def advise_shapes(equation: Equation) -> str:
    """Returns which sizes of a product Tensor Cores run slowly, and what to pad them to; empty for none."""
    # Sizes of half operands should be multiples of 8 elements, 16 bytes: NVIDIA's Training With Mixed
    # Precision, https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html.
    sizes = dict(_sizes(equation))
    thin = {name: sizes.pop(name) for name in ("M", "N") if sizes.get(name, 8) < 8}
    texts = [f"{name} = {size}: pad it to {-(-size // 8) * 8}" for name, size in sizes.items() if size % 8]
    if thin:
        thin_sizes = " and ".join(f"{name} = {size}" for name, size in thin.items())
        texts.insert(0, f"{thin_sizes}: too thin for Tensor Cores")
    return "; ".join(texts)


def advise_keeping(equation: Equation, states: Sequence[State]) -> str:
    """Returns what `keep_float32` on an operand of a matmul saves; empty if it saves little.

    A matmul with vectors, such as the readout of Mamba, reads each number of its larger operand once, and no
    faster on Tensor Cores. If the operand was computed in float32, XLA stores a copy in half for it.
    """
    if equation.primitive.name != "dot_general":
        return ""
    sizes = dict(_sizes(equation))
    for name, var, state in zip(("N", "M"), equation.invars, states):
        # The other operand, whose size has this name, is a vector, or one for each element of the batch.
        is_copied = read.is_float32(var) and not state.is_half and state.source is None
        megabytes = 2 * math.prod(var.aval.shape) / 1e6 if sizes.get(name) == 1 and is_copied else 0.0
        if megabytes >= 1 and sizes["N" if name == "M" else "M"] > 1:
            number = read.describe(var.aval)
            return f"it reads {number} once: jmp.keep_float32 on it saves a copy in half, {megabytes:,.0f} MB"
    return ""


def _sizes(equation: Equation) -> Iterator[tuple[str, int]]:
    """Yields the sizes that should be multiples of 8, each with its name; none if one is symbolic."""
    shapes = [var.aval.shape for var in equation.invars[:2]]
    if not all(isinstance(size, int) for size in itertools.chain(*shapes)):
        return
    if equation.primitive.name == "conv_general_dilated":
        spec = equation.params["dimension_numbers"]
        yield "input channels", shapes[0][spec.lhs_spec[1]]
        yield "output channels", shapes[1][spec.rhs_spec[0]]
    elif equation.primitive.name == "dot_general":
        contracted, batch = equation.params["dimension_numbers"]
        for name, shape, sums, shares in zip(("M", "N"), shapes, contracted, batch):
            own = {*range(len(shape))} - {*sums, *shares}
            yield name, math.prod(shape[axis] for axis in own)
        yield "K", math.prod(shapes[0][axis] for axis in contracted[0])
