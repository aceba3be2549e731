"""Which edits mend a program, and how a user writes them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..._dtypes import DTypeName
from .._values.source import makes_half
from .fewest import fewest
from .modules import Module, in_words, scopes_for
from .runs import Runs
from .written import has_lines

MOST_EDITS = 24
"""How many edits are run alone at most, or left out, to find a remedy: each is one run."""


def few_edits(
    runs: Runs,
    error: Callable[[Sequence[Module]], Any],
    tolerance: Any,
    near: Sequence[Module] = (),
) -> Sequence[Module] | None:
    """Returns a small set of edits that bring an error to a tolerance; None if all are not enough.

    The edits that are `near` the cause are tried first, each alone. A search among runs of one program finds
    the set. It is then written into the program, which decides: it may need casts that no run shows.
    """
    search = _Search(runs, error, tolerance)
    few = search.few(near) or ()
    for kept, must_be_written in _variants(few):
        if search.holds(kept, must_be_written):
            return kept
    every = search.completed(runs.program.edits) or ()
    # Without such casts, the few edits have been tried above.
    sets = (few, every) if runs.silent else (every,)
    for own, must_be_written in (each for edits in sets for each in _variants(edits)):
        if search.holds((*own, *runs.silent), must_be_written):
            return search.reduced(own, runs.silent)
    return None


def _variants(edits: Sequence[Module]) -> Iterator[tuple[Sequence[Module], bool]]:
    """Yields a set of edits without what may follow from others, and then the set.

    The second value is whether the set has to be written: the runs cannot make a part of an edit.
    """
    # The gradients with respect to an argument in float32 are in float32.
    has_arguments = any(edit.is_argument for edit in edits)
    edits = [edit for edit in edits if not (has_arguments and edit.is_gradient)]
    # A carry may follow from a cast, as `jnp.zeros_like(x)` does. A cast to the dtype of another value, such
    # as `x.astype(y.dtype)`, may follow from other edits. Or it is enough that the carry starts in float32.
    casts = [dataclasses.replace(edit, carries=()) if edit.casts else edit for edit in edits]
    starts = [edit for edit in map(_without_cast, edits) if edit.is_edit]
    yield from ((own, True) for own in (casts, starts) if own and own != edits)
    if edits:
        yield edits, False


def _without_cast(edit: Module) -> Module:
    """Returns an edit without its cast, if this may follow from others or from the start of its carry."""
    follows = bool(edit.casts) and (bool(edit.carries) or not all(map(makes_half, edit.lines)))
    return dataclasses.replace(edit, casts="") if follows else edit


@dataclasses.dataclass
class _Search:
    """A search among the edits of a program, each with the rules that it needs."""

    runs: Runs
    error: Callable[[Sequence[Module]], Any]
    tolerance: Any
    tries: int = MOST_EDITS  # How many edits may still be left out.

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
        return self.runs.program.completed(edits)

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

    def holds(self, edits: Sequence[Module], must_be_written: bool = False) -> bool:
        """Whether edits are enough where they are written; those that the tool cannot write, in the runs."""
        is_known = self.runs.write(edits) or not (must_be_written or self.is_left(edits))
        return is_known and self.error(edits) <= self.tolerance

    def is_left(self, edits: Sequence[Module]) -> bool:
        """Whether the program with some edits may be another one than in the runs, or none."""
        # Under a rule, autocast computes in its dtype, whatever the program casts to.
        if all(edit.pattern for edit in edits):
            return False
        is_all = has_lines(edits) and {*self.runs.silent} <= {*edits}
        return not is_all or self.runs.program.is_refused(edits)

    def reduced(self, edits: Sequence[Module], casts: Sequence[Module]) -> Sequence[Module]:
        """Leaves out what the written program does not need: first of the casts that no run shows."""
        if not self.runs.write((*edits, *casts)):
            return (*edits, *casts)
        casts = self._needed(casts, edits)
        return (*self._needed(edits, casts), *casts)

    def _needed(self, edits: Sequence[Module], others: Sequence[Module]) -> Sequence[Module]:
        """Removes the edits that are not needed beside others: in halves first, then in smaller parts."""
        kept, size = [*edits], len(edits)
        while size:
            start = 0
            while start < len(kept) and self.tries:
                self.tries -= 1
                rest = kept[:start] + kept[start + size :]
                if (rest or others) and self.holds((*rest, *others)):
                    kept = rest
                else:
                    start += size
            size //= 2
        return kept


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
