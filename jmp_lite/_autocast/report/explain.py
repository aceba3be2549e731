"""What autocast does to every operation, and why: `explain`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import html
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ..._attention.facts import Facts, unknown
from ..._dtypes import DTypeLike
from ..._jaxpr.arguments import Arguments, check_function, in_two_calls
from ..._jaxpr.read import Jaxpr, all_equations
from ..._jaxpr.scopes import is_by_autocast
from ..._text import aligned, wrapped
from ..api import given_rules, make_plan, prepare, run, settings_of
from ..planner import Planner
from ..planning.plan import Plan
from ..planning.rules import Rules, make_rules
from .advice import find_promotions
from .attentions import AutocastAttention, attentions_of
from .operations import AutocastOperation, operations_of
from .page import page_of

P = ParamSpec("P")

_MOST_ABLATIONS = 20  # Each takes one more plan.


@dataclasses.dataclass(frozen=True, repr=False)
class AutocastReport:
    """What autocast does to a function. `str(report)` is the summary and a table of the modules.

    Attributes:
        dtype: the half dtype; float32 for an autocast that changes nothing.
        operations: every operation with floating operands or results on which an output depends, in the
            order of the program.
        casts: how many casts between float32 and the half dtype were added. Some are copies that only the
            matmuls of gradients read, such as those of a float32 matmul by which a loop decides.
        without_effect: the options of the autocast that change the dtypes of no operation, such as
            `"infer=['exp']"`. With more than twenty entries and patterns nothing is looked for.
        attentions: every softmax between two matmuls, and whether `fuse_attention` runs it.
        before: the function's jaxpr as it was traced; None in a copy, because jaxprs cannot be pickled.
        after: the jaxpr that autocast runs instead; None in a copy.

    Examples:
        >>> report = jmp.explain(jnp.dot, "float16")(jnp.ones((2, 2)), jnp.ones((2, 2)))
        >>> report
        AutocastReport(1 of 1 operations in float16, 3 casts, 100.0% of FLOPs on Tensor Cores)
        >>> report.tensor_core_share, report.in_float32(), [*report.by_module()]
        (1.0, (), [''])
    """

    dtype: np.dtype
    operations: tuple[AutocastOperation, ...]
    casts: int
    without_effect: tuple[str, ...]
    attentions: tuple[AutocastAttention, ...]
    before: Any
    after: Any

    def __getstate__(self) -> dict[str, Any]:
        # A jaxpr holds tracebacks and functions, which cannot be pickled.
        return {**self.__dict__, "before": None, "after": None}

    @property
    def tensor_core_share(self) -> float:
        """The share of the FLOPs of matmuls and convolutions that run in half, from 0 to 1."""
        total = sum(operation.flops for operation in self.operations)
        return sum(o.flops for o in self.operations if o.on_tensor_cores) / total if total else 0.0

    def summary(self) -> str:
        """Returns one line: the operations in half, the casts, the share of FLOPs on Tensor Cores."""
        if self.dtype == jnp.float32:
            return self._summary_as_traced()
        in_fp8 = sum(operation.in_fp8 for operation in self.operations)
        own, other = self._in_half()
        total = f"{len(self.operations):,} operations"
        counts = f"{in_fp8:,} of {total} in fp8, {own:,}" if in_fp8 else f"{own:,} of {total}"
        by_hand = ""
        if other:
            dtype = "bfloat16" if self.dtype == jnp.float16 else "float16"
            by_hand = f"{other:,} in the program's own {dtype}, "
        # With no operation in half, only the matmuls of gradients read what was cast.
        reader = " for gradients" if self.casts and not (own or in_fp8) else ""
        return (
            f"{counts} in {self.dtype.name}, {by_hand}"
            f"{self.casts:,} casts{reader}, {self.tensor_core_share:.1%} of FLOPs on Tensor Cores"
        )

    def _summary_as_traced(self) -> str:
        products = [operation for operation in self.operations if operation.is_product]
        half = sum(operation.in_half for operation in products)
        total = f"{len(self.operations):,} operations as written"
        return f"{total}: {half:,} of {len(products):,} matmuls in half"

    def _in_half(self) -> tuple[int, int]:
        """Returns how many operations are in the half dtype, and how many in the other one.

        The program's own casts may be to the other half dtype, which autocast keeps.
        """
        in_half = [operation for operation in self.operations if operation.in_half and not operation.in_fp8]
        own = sum(any(each.dtype == self.dtype for each in operation.operands) for operation in in_half)
        return own, len(in_half) - own

    def by_module(self, depth: int | None = None) -> dict[str, tuple[AutocastOperation, ...]]:
        """Returns the operations of each module, in the order of the program.

        Args:
            depth: how many names of a module's path count; all by default.
        """
        modules: dict[str, list[AutocastOperation]] = collections.defaultdict(list)
        for operation in self.operations:
            modules["/".join(operation.module.split("/")[:depth])].append(operation)
        return {module: tuple(operations) for module, operations in modules.items()}

    def in_float32(self) -> tuple[AutocastOperation, ...]:
        """Returns the matmuls and convolutions that are not in half, which Tensor Cores could run."""
        return tuple(o for o in self.operations if o.is_product and not o.in_half)

    def table(self) -> str:
        """Returns every operation as text: its list, dtypes, reason, scope and source line."""
        return "\n".join(map(str, self.operations))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as a page of HTML: the source, with the dtype in which each line ran.

        It is one file, which needs no server. Each line that made an operation has its dtype in the forward
        and in the backward pass, and opens to show its operations and the reasons. The modules with the most
        FLOPs in float32 come first. A notebook shows a report in the same way.

        Args:
            path: the file, such as `"precision.html"`.

        Raises:
            OSError: the file cannot be written.
        """
        pathlib.Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        asked = "as traced" if self.dtype == jnp.float32 else f"of autocast to {self.dtype.name}"
        return page_of(self.operations, f"Precision {asked}", self.summary(), str(self))

    def _repr_html_(self) -> str:
        # A frame keeps the style of the page and that of the notebook apart.
        style = "width: 100%; height: 600px; border: 0; resize: vertical"
        return f'<iframe srcdoc="{html.escape(self._page())}" style="{style}"></iframe>'

    def __repr__(self) -> str:
        return f"AutocastReport({self.summary()})"

    def __str__(self) -> str:
        lines = [self.summary(), "", *self._table_of_modules()]
        if self.without_effect:
            lines += ["", *wrapped(f"Options without effect: {', '.join(self.without_effect)}")]
        left = self.in_float32()
        if left:
            lines += ["", "Matmuls that are not in half:", *map(str, left)]
        not_fp8 = filter(None, (operation.not_fp8 for operation in self.operations))
        lines += _counted("Matmuls that are in bfloat16 and not in fp8:", not_fp8)

        def names(operation):
            return f" ({', '.join(operation.arguments)})" if operation.arguments else ""

        slow = (f"{each.advice}{names(each)}" for each in self.operations if each.advice)
        lines += _counted("Matmuls of sizes that Tensor Cores run slowly:", slow)
        lines += _counted("Softmaxes between two matmuls:", map(str, self.attentions))
        unlisted = sorted({operation.name for operation in self.operations if operation.why == "no_list"})
        if unlisted:
            lines += ["", f"Not on any list, left unchanged: {', '.join(unlisted)}"]
        return "\n".join(lines)

    def _table_of_modules(self) -> list[str]:
        rows = [("module", "operations", "in half", "FLOPs", "on Tensor Cores")]
        for module, operations in self.by_module().items():
            flops = sum(o.flops for o in operations)
            share = sum(o.flops for o in operations if o.on_tensor_cores) / flops if flops else 0.0
            half = sum(o.in_half for o in operations)
            rows.append((module or "/", f"{len(operations):,}", f"{half:,}", f"{flops:.3g}", f"{share:.1%}"))
        return aligned(rows)


def _counted(title: str, texts: Iterable[str]) -> list[str]:
    """Returns each text with how often it occurs, under a title; nothing for no texts."""
    counts = collections.Counter(texts).items()
    lines = [line for text, count in counts for line in wrapped(f"{count:,}: {text}", 4)]
    return ["", title, *lines] if lines else []


@in_two_calls
def explain(fun: Callable[P, Any], dtype: DTypeLike | None = None) -> Callable[P, AutocastReport]:
    """Returns a function that reports what autocast does to each operation of `fun`, and why.

    It computes nothing; a `jax.ShapeDtypeStruct` may stand for an array. To see the backward pass too,
    explain `autocast(jax.value_and_grad(loss_fn))`, which runs as `jax.value_and_grad(autocast(loss_fn))`.

    Args:
        fun: a function that `autocast` returned. For any other function it tells what `autocast(fun, dtype)`
            would do.
        dtype: the dtype for a function that `autocast` did not return. With float32 the report is of the
            program as it is: which matmuls its own casts bring to half, and what promotes the others. The
            default is float32 if `fun` calls a function that autocast returned, as a train step does, and
            bfloat16 otherwise.

    Returns:
        A function of the arguments of `fun` that returns a `AutocastReport`.

    Raises:
        TypeError: `fun` is not callable, or it is a transform of a function that autocast returned.
        ValueError: autocast returned `fun`, which has a dtype of its own, and `dtype` is given as well.

    Examples:
        >>> w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
        >>> report = jmp.explain(jmp.autocast(lambda w, x: jnp.exp(x @ w)))(w, x)
        >>> print(report.summary())
        1 of 2 operations in bfloat16, 3 casts, 94.1% of FLOPs on Tensor Cores
        >>> [(operation.name, operation.reason) for operation in report.operations]
        [('dot_general', 'dot_general is on the allow list'), ('exp', 'exp is on the deny list')]
    """
    check_function("explain", fun)
    wrapped, rules = given_rules("explain", fun, dtype, jnp.bfloat16)
    is_by_default = dtype is None and settings_of(fun) is None

    @functools.wraps(fun)
    def explain_fun(*args: Any, **kwargs: Any) -> AutocastReport:
        traced, planner, plan = prepare(wrapped, rules, args, kwargs, (jax.ShapeDtypeStruct,))
        if is_by_default and any(map(is_by_autocast, all_equations(traced.jaxpr))):
            as_it_is = make_rules(jnp.float32)
            return report_of(traced, as_it_is, *make_plan(traced, as_it_is))
        planner.scopes.check()
        return report_of(traced, rules, planner, plan)

    return explain_fun


def report_of(traced: Arguments, rules: Rules, planner: Planner, plan: Plan) -> AutocastReport:
    # With float32 the report is of the program itself, so it says what promotes its half values.
    promotions = find_promotions(plan.jaxpr, traced.names) if rules.dtype == jnp.float32 else {}
    read = [True] * len(plan.results)
    operations = tuple(operations_of(plan, rules.dtype, "", 1, traced.names, promotions, read))
    half = jnp.dtype(jnp.bfloat16) if rules.dtype == jnp.float32 else rules.dtype
    # Counted in what runs, since passes and derivative rules add casts, and not in the plan.
    after = jax.make_jaxpr(lambda *arrays: run(planner, plan, arrays))(*traced.arrays)
    return AutocastReport(
        dtype=rules.dtype,
        operations=operations,
        casts=_casts(after, rules.dtype) - _casts(plan.jaxpr, rules.dtype),
        without_effect=tuple(_without_effect(traced, rules, operations)),
        attentions=tuple(attentions_of(Facts(plan.jaxpr, unknown), half)),
        before=plan.jaxpr,
        after=after,
    )


def _without_effect(
    traced: Arguments, rules: Rules, operations: tuple[AutocastOperation, ...]
) -> Iterator[str]:
    """Yields the options without which every operation has the same dtypes."""

    # The plan without the option is compared, not the numbers, so nothing is computed.
    def dtypes_of(operations):
        return [(operation.operands, operation.results) for operation in operations]

    ablations = list(rules.ablations())
    for written, others in ablations if len(ablations) <= _MOST_ABLATIONS else ():
        _, plan = make_plan(traced, others)
        found = operations_of(plan, rules.dtype, "", 1, traced.names, {}, [True] * len(plan.results))
        if dtypes_of(found) == dtypes_of(operations):
            yield written


def _casts(jaxpr: Jaxpr, half: np.dtype) -> int:
    """Counts the casts between float32 and `half` in a jaxpr and in those inside it."""
    casts = (each for each in all_equations(jaxpr) if each.primitive.name == "convert_element_type")
    both = {np.dtype(np.float32), half}
    return sum({each.invars[0].aval.dtype, each.outvars[0].aval.dtype} == both for each in casts)
