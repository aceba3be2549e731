"""The report of `find_nonfinite`: the operations at which an inf or NaN begins."""

import collections
import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator, Mapping

from ..._autocast.report import page_of
from ..._dtypes import DTypeName
from ..._text import Shown, plural, power, shortened, wrapped
from .._precision.report import HARM, Difference
from .._values.tap import LONG_LOOP

_MOST_OPERANDS = 6  # A loop may take hundreds.


@dataclasses.dataclass(frozen=True)
class Nonfinite:
    """An operation, argument or constant at which an inf or NaN begins.

    Attributes:
        what: `inf` or `NaN`.
        operation: the primitive, as `jax.make_jaxpr` prints it; `argument` or `constant` for an input.
        result: the dtype and shape of the result, such as `float16[8,128]`.
        range: the smallest and the largest element of the result.
        operands: dtype and shape of each operand; the number itself if it is a literal.
        operand_ranges: the same for each operand as `range`; None for integers and numbers.
        module: the named scopes, Flax modules and jitted functions around it, joined by slashes.
        argument: the path of the argument itself, or of the argument that the operation takes. Otherwise the
            last parameter used before it, if any.
        is_operand: whether the operation takes the argument itself.
        line: the line of the program that made it, as `file.py:12:4 (function)`.
        caller: where `line` is in a library, the user's line that called it; otherwise empty.
        direction: `forward`; `derivative` if the forward pass computes it only for the backward pass;
            `backward`; or `recomputed` in the backward pass. Empty outside of the backward pass of a step.
        way: the operations between it and the loss or a gradient, such as `NaN from sub`, each with its line.
        end: the operation that turns it into wrong finite numbers, and its line; empty if it reaches an
            output.
        index: the index of the first such element of an argument or constant; None for an operation.

    Examples:
        >>> report = find_nonfinite(lambda w, x: jnp.sum(w / x))(jnp.ones(4), jnp.arange(4.0))
        >>> report.cause.what, report.cause.operation, report.cause.operand_ranges
        ('inf', 'div', ((1.0, 1.0), (0.0, 3.0)))
    """

    what: str
    operation: str
    result: str
    range: tuple[float, float]
    operands: tuple[str, ...]
    operand_ranges: tuple[tuple[float, float] | None, ...]
    module: str
    argument: str
    is_operand: bool
    line: str
    caller: str
    direction: str
    way: tuple[tuple[str, str], ...]
    end: str
    index: tuple[int, ...] | None

    def __str__(self) -> str:
        return "\n".join([*wrapped(self.head()), *self.details()])

    def details(self) -> list[str]:
        """Returns the lines below the head: where it is, what it took and gave, and where it leads."""
        if self.operation in ("argument", "constant"):
            at = f", first at {list(self.index)}" if self.index is not None else ""
            return [f"    {self.result}{at}"]
        lines = [line for line in (self.caller, self.line) if line]
        pairs = collections.Counter(zip(self.operands, self.operand_ranges)).items()
        takes = [f"takes {text}{_range(ends)}{', twice' if n > 1 else ''}" for (text, ends), n in pairs]
        lines += takes[:_MOST_OPERANDS]
        lines += [f"and {len(takes[_MOST_OPERANDS:])} more"] if takes[_MOST_OPERANDS:] else []
        lines += [f"gives {self.result}{_range(self.range)}"]
        lines += [_OF_WHILE] if self.operation == "while" else []
        changes = "whose result is finite; float32 here changes what the program returns"
        lines += [f"ends in {self.end}, {changes}"] if self.end else []
        way = [f"{what}, {os.path.basename(line.partition(' ')[0])}" for what, line in self.way]
        lines += [f"from there: {'; '.join(way)}"] if way else []
        return [line for text in lines for line in wrapped(shortened(text), 4)]

    def head(self) -> str:
        """Returns the operation and where it is, in one line."""
        if self.operation in ("argument", "constant"):
            return f"{self.what} in the {self.operation} {self.argument}".strip()
        module = f" in {self.module}" if self.module else ""
        argument = f" {'near' if self.is_operand else 'after'} {self.argument}" if self.argument else ""
        comma = "," if module and argument else ""
        parts = [f"{self.what} from {self.operation}{module}{comma}{argument}", _PASSES[self.direction]]
        return ", ".join(filter(None, parts))


_OF_WHILE = "Where inside of the loop was not found: examine its body alone, or write it as a scan."
_PASSES = {
    "": "",
    "forward": "forward pass",
    "derivative": "a derivative that the forward pass computes and stores",
    "backward": "backward pass",
    "recomputed": "recomputed in the backward pass",
}


def _range(extent: tuple[float, float] | None) -> str:
    if extent is None:
        return ""
    low, high = extent
    # `Probe.measure` sorts a NaN above inf, or below -inf if its sign bit is set: the other end may be a
    # number.
    if math.isnan(low) or math.isnan(high):
        return ", with NaN" if math.isnan(high) else f", NaN and up to {high:.4g}"
    if low == high:
        return f", {high:.4g}"
    # A branch that is not taken leaves the record of an array without elements, from inf to -inf.
    return ", no elements" if low > high else f", {low:.4g} to {high:.4g}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A remedy that `find_nonfinite` has run: the change to the program, and the error that remains.

    Attributes:
        change: what to write, in the notation of the program: a loss scale, rules of autocast, the casts to
            leave out, another dtype.
        error: how far the loss and the gradients are then from those in float32, as relative errors.
        helps: whether both errors are at most 0.1.
        loss_scale: the loss scale of the change; None if it is that of the step.
        rules: the `rules=` of `autocast`; empty for another change.
        lines: the lines whose casts to half are left out; empty for another change.
        arguments: the arguments that are passed in float32; empty for another change.
        dtype: `bfloat16` if it is used in place of float16; otherwise empty.

    Examples:
        >>> w, x = {"a": jnp.full((4, 4), 0.3), "b": jnp.full((4, 1), 1e5)}, jnp.ones((2, 4))
        >>> fun = jmp.autocast(lambda w, x: jnp.mean(x @ w["a"] @ w["b"] / 1e6), jnp.float16)
        >>> [(trial.change, trial.helps) for trial in find_nonfinite(fun)(w, x).tried]
        [("rules={'/w/b': 'float32'}", True), ('bfloat16 in place of float16', True)]
    """

    change: str
    error: Difference
    helps: bool
    loss_scale: float | None = None
    rules: Mapping[str, DTypeName] = dataclasses.field(default_factory=dict)
    lines: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    dtype: str = ""

    def __str__(self) -> str:
        worst = max(self.error.loss, self.error.gradients)
        outcome = f"error {worst:.1e}" if math.isfinite(worst) else "still not finite"
        if self.helps and worst > HARM:
            outcome = f"error {self.error.gradients:.1e} of the gradients, of a loss near zero {worst:.1e}"
        return f"{shortened(self.change)}: {'fixes it' if self.helps else 'does not fix it'}, {outcome}"


@dataclasses.dataclass(frozen=True, repr=False)
class NonfiniteReport(Shown):
    """Where a loss or its gradients become inf or NaN. `print` it for one page.

    An inf or NaN is harmful if it reaches the loss or a gradient; in a step, its results or the values that
    it tests for inf and NaN. An inf from half arithmetic is also harmful if a later operation turns it into
    wrong finite numbers, as `rsqrt` returns 0 for it.

    Attributes:
        loss: the loss; None for a step.
        loss_scale: the scale at which it ran.
        parameters: how many gradients there are; for a step, how many floating arrays it returns.
        gradients: the paths of the gradients that are not finite; for a step, of its results.
        first_inf: the first operation, if any, that gives a harmful inf for finite operands.
        first_nan: the first operation, if any, that gives a harmful NaN for operands without NaN.
        others: the other operations at which a harmful inf or NaN begins.
        earlier: the operations before the cause at which half arithmetic gives an inf that another operation
            turns into finite numbers, as `rsqrt` does. They may be where the numbers went wrong.
        harmless: the operations at which a harmless one begins, such as a mask of -inf that a softmax reads.
        fitting_scale: the largest power of two below the scale at which the loss and all gradients are
            finite. None if there is none, or if the first inf or NaN is not in the backward pass.
        cut: the lines of the `while` loops that were stopped after 10,000 steps. What follows the first of
            them was not examined.
        tried: the changes that were run, for the cause; empty if the program has no half values, or is not
            finite in float32 either.
        is_finite_in_float32: whether the loss and all gradients are finite in float32; None if not run.
        rounded: a sentence for each number of the program that is 0 or inf in half, if a remedy was tried.
        hint: a well-known reason why the operation gives inf or NaN; empty if a change was tried.
        aux: the paths of the auxiliary results that are not finite, and are in float32.

    Examples:
        >>> report = find_nonfinite(lambda w: jnp.sum(w["head"]) * 1e3, loss_scale=2.0**120)(
        ...     {"head": jnp.ones(2)}
        ... )
        >>> report.is_finite, report.gradients, report.fitting_scale == 2.0**118
        (False, ('head',), True)
    """

    loss: float | None
    loss_scale: float
    parameters: int
    gradients: tuple[str, ...] = ()
    first_inf: Nonfinite | None = None
    first_nan: Nonfinite | None = None
    others: tuple[Nonfinite, ...] = ()
    harmless: tuple[Nonfinite, ...] = ()
    earlier: tuple[Nonfinite, ...] = ()
    fitting_scale: float | None = None
    cut: tuple[str, ...] = ()
    tried: tuple[Trial, ...] = ()
    is_finite_in_float32: bool | None = None
    rounded: tuple[str, ...] = ()
    hint: str = ""
    aux: tuple[str, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite, and no `aux` is lost; for a step, its results."""
        return (self.loss is None or math.isfinite(self.loss)) and not self.gradients and not self.aux

    @property
    def cause(self) -> Nonfinite | None:
        """The first harmful inf or NaN; None if there is none."""
        return next(iter(self._first()), None)

    @property
    def remedies(self) -> tuple[Trial, ...]:
        """The changes that bring the loss and the gradients to those in float32."""
        return tuple(trial for trial in self.tried if trial.helps)

    @property
    def _nan_from_inf(self) -> bool:
        extents = [extent for extent in self.first_nan.operand_ranges if extent] if self.first_nan else []
        return any(math.isinf(end) for extent in extents for end in extent)

    @property
    def smaller_scale(self) -> float | None:
        """The smaller loss scale that alone makes the result right; None if there is none."""
        scales = [trial.loss_scale for trial in self.remedies]
        return self.fitting_scale if self.fitting_scale in scales else None

    def advice(self) -> list[str]:
        """Returns the paragraphs about the cause: what was tried, or that float32 is not finite either."""
        if self.cause is None:
            return []
        if self.tried:
            lines = [line for text in self.rounded for line in wrapped(shortened(text))]
            lines += ["Remedies that were run, with the relative error against float32:"]
            lines += [line for trial in self.tried for line in wrapped(str(trial), 4)]
            return ["\n".join(lines if self.remedies else [*lines, "None of these fixes it."])]
        either = "" if self.is_finite else " either"
        is_wide = self.is_finite_in_float32 is False
        text = [f"With every operation in float32 it is not finite{either}."] if is_wide else []
        text += [f"A hint: {self.hint}"] if self.hint else []
        return ["\n".join(wrapped(" ".join(text)))] if text else []

    def before(self) -> list[str]:
        """Returns the lines about the first inf before the cause that becomes finite."""
        if not self.earlier:
            return []
        end = wrapped(shortened(f"{self.earlier[0].line}, ends in {self.earlier[0].end}"), 4)
        return ["Before it, and perhaps its cause:", *wrapped(self.earlier[0].head()), *end]

    def marks(self) -> Iterator[tuple[str, str]]:
        """Yields lines, each with what to say of it: where it begins, its way from there, what mends it."""
        found = self._first()
        starts = {origin.line for origin in found}
        for origin, start in zip(found, ("It begins here", "Then" if self._nan_from_inf else "Beside it")):
            yield origin.caller or origin.line, f"{start}: {origin.head()}."
            on_the_way = ((what, line) for what, line in origin.way if line not in starts)
            yield from ((line, f"On the way from there: {what}.") for what, line in on_the_way)
        yield from ((origin.line, f"Perhaps its cause: {origin.head()}.") for origin in self.earlier[:1])
        yield from ((line, str(trial)) for trial in self.remedies for line in trial.lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as a page of HTML: the source, with a mark below each line that it names.

        Args:
            path: the file, such as `"nonfinite.html"`.

        Raises:
            OSError: the file cannot be written.
        """
        page = page_of((), "Where inf or NaN begins", self.summary(), str(self), [*self.marks()])
        pathlib.Path(path).write_text(page, encoding="utf-8")

    def _first(self) -> list[Nonfinite]:
        """Returns the first inf and the first NaN; the NaN first if the inf is not its cause."""
        found = [origin for origin in (self.first_nan, self.first_inf) if origin is not None]
        if len(found) < 2:
            return found
        # If only the backward pass has the NaN, the inf is first: log(0) is -inf, its derivative 0 / 0.
        is_later = found[0].direction in ("derivative", "backward") and found[1].direction == "forward"
        return found[::-1] if self._nan_from_inf or is_later else found

    def summary(self) -> str:
        """Returns one line: the loss, the gradients, and the loss scale."""
        inside = " A value inside of it is not finite." if self.is_finite and self.cause is not None else ""
        if self.loss is None:
            results = self._finite("result of one step", "results of one step")
            return f"{results[0].upper()}{results[1:]}.{inside}"
        gradients = self._finite("gradient", "gradients")
        scale = f"the loss scale is {power(self.loss_scale)}"
        if self.is_finite:
            return f"The loss, {self.loss:.6g}, is finite, and {gradients}; {scale}.{inside}"
        names = ", ".join(name or "the only one" for name in self.aux[:4])
        aux = f" These auxiliary results are not finite, and are in float32: {names}." if self.aux else ""
        return f"The loss is {self.loss:.6g}; {gradients}; {scale}.{aux}"

    def _finite(self, one: str, several: str) -> str:
        """Returns which of the outputs are finite, in words."""
        bad = [name for name in self.gradients if name]  # A lone array has no name.
        names = f" ({', '.join(bad[:4])}{f' and {len(bad) - 4} more' if len(bad) > 4 else ''})" if bad else ""
        if self.parameters == 1:
            return f"the {one}{names} is {'not ' if self.gradients else ''}finite"
        if not self.gradients:
            return f"all {self.parameters} {several} are finite"
        return f"{len(self.gradients)} of {self.parameters} {several} are not finite{names}"

    def __repr__(self) -> str:
        cause = self.cause
        return f"NonfiniteReport({self.summary() if cause is None else str(cause).splitlines()[0]})"

    def __str__(self) -> str:
        lines = wrapped(self.summary())
        for line in self.cut:
            lines += wrapped(f"Not examined: what follows {LONG_LOOP}, {shortened(line)}.")
        lines += ["", "It begins here:", str(self.cause)] if self.cause else []
        lines += [line for paragraph in self.advice() for line in ("", paragraph)]
        for origin in self._first()[1:]:
            lines += ["", "Then:" if self._nan_from_inf else "Beside it:", *wrapped(origin.head())]
            lines += wrapped(shortened(origin.line), 4)
        lines += ["", *self.before()] if self.earlier else []
        if self.others:
            lines += ["", f"It begins at {plural(len(self.others), 'further operation')}, such as:"]
            lines += [*wrapped(self.others[0].head()), *wrapped(shortened(self.others[0].line), 4)]
        return "\n".join([*lines, *self._harmless_lines()])

    def _harmless_lines(self) -> list[str]:
        heads = list(dict.fromkeys(origin.head() for origin in self.harmless))
        lines = ["", "Harmless, since it reaches no result:"] if heads else []
        lines += [line for head in heads[:5] for line in wrapped(head, 4)]
        return [*lines, f"    and {len(heads) - 5} more"] if len(heads) > 5 else lines
