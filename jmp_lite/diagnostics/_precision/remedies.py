"""Which edits mend a program, and how a user writes them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..._dtypes import DTypeName
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

    The edits that are `near` the cause are tried first, each alone. None of the set can be left out.
    `of_gradients`: whether the error may be that of a backward pass.
    """

    def completed(edits):
        return runs.program.completed(edits, of_gradients)

    def is_enough(kept):
        own = completed(kept)
        return own is not None and error(own) <= tolerance

    def needed_by(edit):
        return len(completed([edit]) or runs.program.edits)

    def least(kept):
        # An edit that others need may be enough without them.
        own = completed(fewest(kept, is_enough) or ())
        return own and completed(fewest(sorted(own, key=needed_by), is_enough) or own)

    for kept in (*([edit] for edit in sorted(near, key=needed_by)), near):
        if kept and is_enough(kept):
            return least(kept)
    edits = sorted(runs.program.edits, key=lambda edit: edit.name)
    if len(edits) > MOST_EDITS:
        return completed(edits) if is_enough(edits) else None
    edits = [edit for edit in edits if completed([edit]) is not None]
    without = {edit: error([other for other in edits if other is not edit]) for edit in edits}
    return least(sorted(edits, key=lambda edit: without[edit], reverse=True)) or None


def words_for(runs: Runs, kept: Sequence[Module]) -> str:
    """Returns what to write to keep modules in float32, in the notation of the program."""
    rules, own = rules_for(runs, kept), [module for module in kept if not module.pattern]
    return "; ".join([*([f"rules={rules}"] if rules else []), *([in_words(own)] if own else [])])


def rules_for(runs: Runs, kept: Sequence[Module]) -> dict[str, DTypeName]:
    """Returns the rules for some modules, with those of the function that still select something."""
    rules, modules = runs.program.rules, runs.program.modules
    scopes = scopes_for(kept, modules, runs.program.dtype.name)
    rules = dataclasses.replace(rules, scopes=(*scopes, *rules.scopes))
    operations = runs.program.operations
    paths = {path for operation in operations for path in (operation.scope, *operation.arguments)}
    used = {match[0] for path in paths if path and (match := rules.pattern_for(path))}
    # A pattern may occur twice: the first one counts.
    dtypes: Any = dict(reversed(rules.scopes))
    return {pattern: dtypes[pattern] for pattern, _ in rules.scopes if pattern in used}
