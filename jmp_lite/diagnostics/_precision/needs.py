"""Which edits need others: autocast casts what an edit makes float32, and some values share a dtype."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from .modules import Module

Need: TypeAlias = tuple[str, frozenset[str]]
"""The key of an edit, and the keys of others: the edit needs at least one of them."""
Tie: TypeAlias = tuple[frozenset[str], ...]
"""Half values that must share a dtype. Each is the set of the names of the edits that make it float32."""


def completed(needs: Sequence[Need], edits: Collection[str], every: Collection[str]) -> frozenset[str] | None:
    """Returns some edits, with those of `every` that they need as well; None if they are not enough."""
    done = frozenset(edits)
    while missing := [own for edit, own in needs if edit in done and own.isdisjoint(done)]:
        if not (known := sorted(missing[0].intersection(every))):
            return None
        done |= {known[0]}
    return done


def is_refused(ties: Sequence[Tie], names: Collection[str]) -> bool:
    """Whether JAX refuses a program with some edits alone, since values that share a dtype would have two."""
    wide = ([not each.isdisjoint(names) for each in tie] for tie in ties)
    return any(any(own) and not all(own) for own in wide)


def rules_needed(
    own: Mapping[Module, Collection[int]], rules: Mapping[int, Module | None], cast: Sequence[Module]
) -> Iterator[Need]:
    """Yields which edit needs which other one under autocast. `rules` has what selects a product, or None."""
    # In float32, a half product of the program is one that autocast casts, if no rule selects it.
    for edit, members in own.items():
        if edit.is_edit:
            found = (rules[n] for n in members if n in rules)
            yield from ((edit.key, frozenset({rule.key} if rule else ())) for rule in found)
    # A rule selects an argument that is passed in float32.
    given = {edit.name: edit.key for edit in own if edit.is_argument}
    for module in cast:
        if (argument := module.name.partition("/")[0]) in given:
            yield module.key, frozenset({given[argument]})
