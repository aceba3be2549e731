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
    runs: Runs, error: Callable[[Sequence[Module]], Any], tolerance: Any, near: Sequence[Module] = ()
) -> Sequence[Module] | None:
    """Returns a small set of edits that bring an error to a tolerance; None if all are not enough.

    The edits that are `near` the cause are tried first, each alone. None of the set can be left out.
    """
    for kept in (*([edit] for edit in near), near):
        if kept and error(kept) <= tolerance:
            return fewest(kept, error, tolerance)
    edits = sorted(runs.program.edits, key=lambda edit: edit.name)
    if len(edits) > MOST_EDITS:
        return edits if error(edits) <= tolerance else None
    alone = {edit: error([other for other in edits if other is not edit]) for edit in edits}
    return fewest(sorted(edits, key=lambda edit: alone[edit], reverse=True), error, tolerance)


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
