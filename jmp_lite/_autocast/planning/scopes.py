"""The scopes that autocast leaves as they are: `full_precision`, another autocast, the user's rules."""

import difflib

import jax.numpy as jnp

from ..._jaxpr.scopes import AUTOCAST_SCOPE, FULL_PRECISION_SCOPE, SOLVER_SCOPE, reason_of_scope
from ..._paths import matches
from .rules import Rules


def by_rule(pattern: str) -> str:
    return f"the rule for '{pattern}'"


INSIDE_FULL_PRECISION = "inside full_precision"
# Why the scopes of this library stay as they were traced. A scope is a name in the name stack of an equation,
# where every transform of JAX keeps it (https://github.com/jax-ml/jax/pull/8395): so it holds in a backward
# pass and in a loop too, where a Python context would be over.
_OWN_SCOPES = {
    AUTOCAST_SCOPE: "the autocast inside has decided",
    FULL_PRECISION_SCOPE: INSIDE_FULL_PRECISION,
    SOLVER_SCOPE: "inside a linear solver: rounding would slow it down, or stop it too early",
}
# What a pattern of each option should have selected, as the end of an error's first sentence.
_SELECTS_NOTHING = {
    "float32_results": (
        "matmul with half inputs: either nothing has that name, or its matmuls already run in float32. "
        "`explain` lists the scopes and the matmuls."
    ),
    "half_sums": (
        "residual sum. Such a sum adds the result of a matmul to a float32 array of its shape, and matmuls "
        "read it later, directly or through a norm. `explain` lists the scopes."
    ),
}


class Scopes:
    """The rules for the scopes and arguments of one call of an autocast function."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._used: set[str] = set()  # The patterns of `rules` that were the first to select something.
        self._selecting: set[tuple[str, str]] = set()  # Those of other options (`note_used`).
        self._seen: set[str] = set()  # The scopes and arguments of the program, for the hints of errors.
        self._reasons: dict[str, str] = {}
        # The scopes that a rule keeps in float32, of those that `why_as_traced` was asked about.
        self.kept_by_rules: set[str] = set()

    def cache_key(self, scope: str) -> str:
        """Returns the part of a scope on which decisions depend: plans are kept by this key."""
        if self._rules.scopes or self._rules.float32_results or self._rules.half_sums:
            return scope
        # Without patterns, a function that is called in many scopes, such as a layer, is planned once.
        return next((name for name in _OWN_SCOPES if name in scope), "")

    def why_as_traced(self, path: str) -> str:
        """Returns why the scope `path` stays as it was traced; empty if autocast changes it."""
        if path not in self._reasons:
            self._reasons[path] = self._why_as_traced(path)
        return self._reasons[path]

    def _why_as_traced(self, path: str) -> str:
        for scope, reason in _OWN_SCOPES.items():
            if scope in path:
                return reason_of_scope(path)[1] or reason
        if self._rules.dtype == jnp.float32:
            return "the dtype is float32"
        rule = self.rule_for(path)
        if rule is None or rule[1] != "float32":
            return ""
        self.kept_by_rules.add(path)
        return by_rule(rule[0])

    def rule_for(self, path: str) -> tuple[str, str] | None:
        """Returns the first rule that selects the scope or argument `path`, if any: its pattern and dtype."""
        if not self._rules.scopes:
            return None
        self._seen.add(path)
        rule = self._rules.pattern_for(path)
        if rule is not None:
            self._used.add(rule[0])
        return rule

    def note_used(self, option: str, pattern: str) -> None:
        """Notes that a pattern of `float32_results` or of `half_sums` has selected an operation."""
        self._selecting.add((option, pattern))

    def check(self) -> None:
        """Raises a ValueError if a pattern has selected nothing, as a misspelt pattern does."""
        for pattern, _ in self._rules.scopes:
            if pattern not in self._used | self._rules.optional:
                self._check_for_rule_in_front(pattern)
                near = difflib.get_close_matches(pattern, self._seen, n=3, cutoff=0.3)
                hint = f" Close to it are {', '.join(map(repr, near))}." if near else ""
                raise ValueError(
                    f"The rule for '{pattern}' selects nothing: no named scope, Flax module, jitted function "
                    f"or argument that the function uses has that name.{hint} `explain` lists the scopes."
                )
        for option, nothing in _SELECTS_NOTHING.items():
            for pattern in getattr(self._rules, option):
                if (option, pattern) not in self._selecting:
                    raise ValueError(f"{option}='{pattern}' selects no {nothing}")

    def _check_for_rule_in_front(self, pattern: str) -> None:
        """Raises a ValueError if a pattern has selected nothing because rules in front of it did."""
        for path in sorted(self._seen):
            if matches(pattern, path):
                first, dtype = self._rules.pattern_for(path) or ("", "")
                raise ValueError(
                    f"The rule for '{pattern}' has no effect: the first rule that matches wins, and the rule "
                    f"for '{first}' in front of it selects '{path}' and gives {dtype}. Write the narrower "
                    "pattern first."
                )
