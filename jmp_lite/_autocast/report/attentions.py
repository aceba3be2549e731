"""The softmaxes between two matmuls in a program: which are fused, and why the others are not."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from ..._attention.facts import Facts
from ..._attention.find import DIFFERENTIATED, Attention, find_attentions, may_hold_attention
from ..._attention.run import why_not_fused
from ..._jaxpr.lines import source_line
from ..._jaxpr.scopes import FUSED_SCOPE, is_of_gradient, is_transposed, scope_of
from ..._paths import visible_scope
from .flops import known


@dataclasses.dataclass(frozen=True)
class AutocastAttention:
    """One attention that `explain` found, and whether it is fused: a softmax between two matmuls.

    Attributes:
        fused: whether `fuse_attention` runs it as flash attention.
        why_not: why it is not fused, in words; empty if it is.
        scores: the bytes of its scores in half precision in one call of the function. Flash attention stores
            none of them.
        scope: the named scopes and Flax modules around it, joined by slashes.
        source: the line of its second matmul, as `file.py:12:4 (function)`.

    Examples:
        >>> attend = lambda x: jax.nn.softmax(jnp.tanh(x @ x.mT)) @ x
        >>> (attention,) = jmp.explain(attend)(jnp.ones((2, 16, 8))).attentions
        >>> attention.fused, attention.why_not, attention.scores
        (False, 'the scores pass through tanh', 1024)
    """

    fused: bool
    why_not: str
    scores: int
    scope: str
    source: str

    def __str__(self) -> str:
        size = f"{self.scores / 1e6:,.1f} MB of scores"
        if self.fused:
            return f"fused, which stores none of {size}; {self.scope or '/'}; {self.source}"
        return f"not fused, which would save {size}: {self.why_not}; {self.scope or '/'}; {self.source}"


def attentions_of(
    facts: Facts, half: Any, times: int = 1, in_gradient: bool = False
) -> Iterator[AutocastAttention]:
    """Yields the softmaxes between two matmuls of a jaxpr and of those inside it.

    Args:
        facts: the facts of the jaxpr.
        half: the half dtype.
        times: how often the jaxpr runs.
        in_gradient: whether the program has taken a derivative of it.
    """
    found = find_attentions(facts)
    for index, equation in enumerate(facts.equations):
        scope = scope_of(equation)
        # A fused attention is a `lax.platform_dependent`: the branch of other platforms, the last one, has
        # the attention as the program wrote it. Its transpose is the backward pass of the same attention.
        if FUSED_SCOPE in scope and equation.primitive.name == "cond" and not is_transposed(equation):
            *_, (as_written, _) = facts.inside(equation)
            for attention in attentions_of(as_written, half, times):
                yield dataclasses.replace(attention, fused=True, why_not="", scope=visible_scope(scope))
        elif index in found:
            why_not = DIFFERENTIATED if in_gradient else why_not_fused(found[index], half, "cudnn")
            yield _described(found[index], why_not or "jmp.fuse_attention would fuse it", times, scope)
        elif may_hold_attention(equation):
            # The iterations of a `scan`. Those of a `while` are not known.
            runs = times * known(equation.params.get("length", 1))
            for inside, _ in facts.inside(equation):
                yield from attentions_of(inside, half, runs, in_gradient or is_of_gradient(equation))


def _described(attention: Attention, why_not: str, times: int, scope: str) -> AutocastAttention:
    product = attention.equations[-1]
    # A symbolic size counts as 1.
    sizes = [size for size in product.invars[attention.side].aval.shape if isinstance(size, int)]
    return AutocastAttention(
        fused=not why_not,
        why_not=why_not,
        scores=2 * math.prod(sizes) * times,  # In half, two bytes each.
        scope=visible_scope(scope),
        source=source_line(product),
    )
