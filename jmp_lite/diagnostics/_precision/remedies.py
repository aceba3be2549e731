"""Which edits mend a program, and how a user writes them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..._dtypes import DTypeName
from .._values.source import makes_half
from .fewest import fewest
from .modules import Module, in_words, scopes_for
from .runs import Runs

MOST_EDITS = 24
"""How many modules or casts are run alone at most to find a remedy: each is one run."""


def few_edits(
    runs: Runs,
    error: Callable[[Sequence[Module]], Any],
    tolerance: Any,
    near: Sequence[Module] = (),
    of_gradients: bool = True,
) -> Sequence[Module] | None:
    """Returns a small set of edits that bring an error to a tolerance; None if all are not enough.

    The edits that are `near` the cause are tried first, each alone. A search among runs of one program finds
    the set. It is then written into the program, which decides.
    `of_gradients`: whether the error may be that of a backward pass.
    """

    search = _Search(runs, error, tolerance, of_gradients)
    found = (search.few(near), search.completed(runs.program.edits))
    unknown = runs.program.unknown_casts
    for kept, must_be_written in (each for own in found if own for each in _candidates(own, unknown)):
        is_known = runs.write(kept) or not must_be_written
        if is_known and error(kept) <= tolerance:
            return kept
    return None


def _candidates(edits: Sequence[Module], unknown: Sequence[Module]) -> Iterator[tuple[list[Module], bool]]:
    """Yields sets of edits in the order in which they are tried, and whether the runs alone do not decide."""

    def follows(edit):
        return bool(edit.casts) and not all(map(makes_half, edit.lines))

    # The gradients with respect to an argument in float32 are in float32.
    has_arguments = any(edit.is_argument for edit in edits)
    edits = [edit for edit in edits if not (has_arguments and edit.is_gradient)]
    # A cast to the dtype of another value, such as `x.astype(y.dtype)`, may follow from the other edits, as
    # from the start of a carry. A carry may follow from a cast, as `jnp.zeros_like(x)` does.
    starts = [dataclasses.replace(edit, casts="", after=()) if follows(edit) else edit for edit in edits]
    starts = [edit for edit in starts if edit.is_edit]
    casts = [dataclasses.replace(edit, carries=()) if edit.casts else edit for edit in edits]
    for own in (starts, casts):
        if own and own != edits:
            yield own, True
    # A value may be left in half at a cast that is not known, but for rules of autocast.
    yield edits, bool(unknown) and not all(edit.pattern for edit in edits)
    if unknown:
        yield [*edits, *unknown], False


@dataclasses.dataclass
class _Search:
    """A search among the edits of a program, each with those that it needs."""

    runs: Runs
    error: Callable[[Sequence[Module]], Any]
    tolerance: Any
    of_gradients: bool

    def few(self, near: Sequence[Module]) -> Sequence[Module] | None:
        """Returns few edits that are enough; those `near` the cause are tried first."""
        for kept in (*([edit] for edit in sorted(near, key=self.size)), near):
            if kept and self.is_enough(kept):
                return self.least(kept)
        edits = sorted(self.runs.program.edits, key=lambda edit: edit.name)
        if len(edits) > MOST_EDITS:
            return self.completed(edits) if self.is_enough(edits) else None
        edits = [edit for edit in edits if self.completed([edit]) is not None]
        without = {edit: self.error([other for other in edits if other is not edit]) for edit in edits}
        return self.least(sorted(edits, key=lambda edit: without[edit], reverse=True)) or None

    def completed(self, edits: Sequence[Module]) -> tuple[Module, ...] | None:
        return self.runs.program.completed(edits, self.of_gradients)

    def is_enough(self, edits: Sequence[Module]) -> bool:
        own = self.completed(edits)
        return own is not None and self.error(own) <= self.tolerance

    def size(self, edit: Module) -> int:
        """Returns how many edits there are with those that one needs."""
        return len(self.completed([edit]) or self.runs.program.edits)

    def least(self, edits: Sequence[Module]) -> tuple[Module, ...] | None:
        """Returns a set of edits that are all needed."""
        # The second search starts with the edits that need few others: one that others need may be enough.
        own = self.completed(fewest(edits, self.is_enough) or ())
        return own and self.completed(fewest(sorted(own, key=self.size), self.is_enough) or own)


def words_for(runs: Runs, kept: Sequence[Module]) -> str:
    """Returns what to write to keep modules in float32, in the notation of the program."""
    rules, own = rules_for(runs, kept), [module for module in kept if not module.pattern]
    return "; ".join([*([f"rules={rules}"] if rules else []), *([in_words(own)] if own else [])])


def rules_for(runs: Runs, kept: Sequence[Module]) -> dict[str, DTypeName]:
    """Returns the rules for some modules, with those of the function that still select something."""
    rules, edits = runs.program.rules, runs.program.edits
    scopes = scopes_for(kept, edits, runs.program.dtype.name)
    rules = dataclasses.replace(rules, scopes=(*scopes, *rules.scopes))
    operations = runs.program.operations
    paths = {path for operation in operations for path in (operation.scope, *operation.arguments)}
    used = {match[0] for path in paths if path and (match := rules.pattern_for(path))}
    # A pattern may occur twice: the first one counts.
    dtypes: Any = dict(reversed(rules.scopes))
    return {pattern: dtypes[pattern] for pattern, _ in rules.scopes if pattern in used}
