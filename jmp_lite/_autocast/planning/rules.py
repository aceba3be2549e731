"""Reads the options of `autocast`: the category of every operation, and the exceptions by scope."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, primitives

from ..._dtypes import FLOAT8, FLOAT8_ADVICE, DTypeLike, parse_dtype, parse_reduce_dtype
from ..._jaxpr.primitives import PRIMITIVES, Category, traits_of
from ..._paths import as_patterns, matches
from ..._policy import Rule, rule_pairs

# The types of three parameters of `autocast`, whose docstring explains them.
Operations = Iterable[str | Primitive] | None
"""Primitives, by name (`"exp"`) or as the primitive (`jax.lax.exp_p`); `"-exp"` takes one off its list."""

ScopeRules = Mapping[str, DTypeLike] | Iterable[Rule | tuple[str, DTypeLike]] | None
"""Exceptions by scope: patterns over scopes and argument paths, each with a dtype; of a `Rule`, its compute
dtype."""

Patterns = str | Iterable[str] | None
"""A pattern over scopes and argument paths, or several."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """The options of an autocast, after all checks. An option with patterns also needs `Scopes.cache_key`."""

    dtype: np.dtype  # Float16 or bfloat16; float32 for an autocast that changes nothing.
    # The category of each primitive that the table or the user names.
    categories: MappingProxyType[str, Category]
    # Pairs of a pattern over scopes and argument paths, and the name of the dtype that the products there
    # take: "float32", the name of the half dtype, or "float8". The first pattern that matches wins.
    scopes: tuple[tuple[str, str], ...]
    # The primitives that the user has put on a list, or taken off one, each with how it was written.
    listed: MappingProxyType[str, str]
    # Float32 if the products that make weight gradients give float32; else None.
    reduce_dtype: np.dtype | None = None
    # The precision that `jax_default_matmul_precision` gives to products; None for none. The program did not
    # ask for it.
    precision: Any = None
    # Patterns over scopes and argument paths: their products give float32 results.
    float32_results: tuple[str, ...] = ()
    half_sums: tuple[str, ...] = ()  # Patterns over scopes: their residual sums give half results.
    in_fp8: bool = False  # Whether large products run in fp8.
    optional: frozenset[str] = frozenset()  # The patterns of `scopes` that may select nothing.

    def category_of(self, name: str) -> Category:
        # A primitive that neither the table nor the user names keeps its dtypes, such as one of a package.
        return self.categories.get(name, Category.AS_TRACED)

    def ablations(self) -> Iterator[tuple[str, "Rules"]]:
        """Yields each option as the user wrote it, and the rules without it."""
        defaults = _default_categories(self.dtype)
        for name, written in self.listed.items():
            categories = {**self.categories, name: defaults.get(name, Category.AS_TRACED)}
            listed = MappingProxyType({other: text for other, text in self.listed.items() if other != name})
            yield written, dataclasses.replace(self, categories=MappingProxyType(categories), listed=listed)
        for option in ("scopes", "float32_results", "half_sums"):
            given = getattr(self, option)
            for n, entry in enumerate(given):
                rule = f"rules={{{entry[0]!r}: {entry[1]!r}}}"
                written = rule if option == "scopes" else f"{option}={entry!r}"
                yield written, dataclasses.replace(self, **{option: given[:n] + given[n + 1 :]})
        if self.reduce_dtype is not None:
            yield f"reduce_dtype='{self.reduce_dtype.name}'", dataclasses.replace(self, reduce_dtype=None)

    @property
    def halves_products(self) -> bool:
        """Whether products of the allow list take half operands: the user has not taken them off."""
        return self.category_of("dot_general") is Category.ALLOW

    def pattern_for(self, path: str) -> tuple[str, str] | None:
        """Returns the first rule that selects the scope or argument `path`: the pattern and the dtype."""
        return next((scope for scope in self.scopes if matches(scope[0], path)), None)

    def gives_half(self, path: str) -> bool:
        """Whether the rule that selects the scope `path` gives half or float8."""
        rule = self.pattern_for(path)
        return rule is not None and rule[1] != "float32"

    def is_first(self, rule: tuple[str, str] | None) -> bool:
        """Whether a rule gives half or float8, and stands before all rules that give float32."""
        if rule is None or rule[1] == "float32":
            return False
        return all(dtype != "float32" for _, dtype in self.scopes[: self.scopes.index(rule)])


def first_match(patterns: Iterable[str], path: str) -> str:
    """Returns the first pattern that selects a scope or argument, or nothing."""
    return next((pattern for pattern in patterns if matches(pattern, path)), "")


def _is_float8(dtype: DTypeLike) -> bool:
    return isinstance(dtype, str) and dtype == FLOAT8


def make_rules(
    dtype: DTypeLike,
    allow: Operations = (),
    deny: Operations = (),
    infer: Operations = (),
    rules: ScopeRules = (),
    reduce_dtype: DTypeLike | None = None,
    float32_results: Patterns = (),
    half_sums: Patterns = (),
) -> Rules:
    """Reads the options of `autocast`; see there.

    Raises:
        TypeError, ValueError: an option is not one that autocast takes.
    """
    float8 = _is_float8(dtype)
    # fp8 is an action of a plan for bfloat16 (`_float8`): all other operations run as in bfloat16.
    half = np.dtype(jnp.bfloat16) if float8 else parse_dtype(dtype)
    if half not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise ValueError(
            "autocast computes in float16 or bfloat16, in 'float8' (large matmuls in fp8, all else in "
            f"bfloat16), or in float32, which changes nothing. Got dtype={half.name}."
        )
    reduced = parse_reduce_dtype(reduce_dtype)
    categories = _default_categories(half)
    listed = _change(categories, {Category.ALLOW: allow, Category.DENY: deny, Category.INFER: infer})
    scopes, optional = _scopes(half, float8, rules)
    return Rules(
        half,
        MappingProxyType(categories),
        scopes,
        MappingProxyType(listed),
        reduced,
        in_fp8=float8,
        float32_results=as_patterns(
            () if float32_results is None else float32_results,
            "float32_results= takes patterns over scopes and arguments, such as '**/head'",
        ),
        half_sums=as_patterns(
            () if half_sums is None else half_sums,
            "half_sums= takes patterns over scopes, such as '**/block_*'",
        ),
        optional=optional,
    )


def _default_categories(half: np.dtype) -> dict[str, Category]:
    """Returns the category of each primitive of the table, for a half dtype."""
    in_range = Category.DENY if half == jnp.float16 else Category.INFER
    categories = {name: traits.category for name, traits in PRIMITIVES.items()}
    return {name: in_range if each is Category.RANGE else each for name, each in categories.items()}


def _change(categories: dict[str, Category], options: dict[Category, Operations]) -> dict[str, str]:
    """Changes the category of each primitive that the user names. Returns the names, as they were written."""
    given: dict[str, str] = {}
    written: dict[str, str] = {}
    for category, entries in options.items():
        for entry in _entries(category.value, entries):
            name, taken_off = _primitive_name(category.value, entry)
            if name in given:
                raise ValueError(
                    f"The operation '{name}' was given twice, in {given[name]}= and in {category.value}=."
                )
            given[name] = category.value  # For an error about a second entry, in this option or another.
            written[name] = f"{category.value}=['{'-' if taken_off else ''}{name}']"
            if not taken_off:
                _check(category, name)
                categories[name] = category
            elif categories.get(name) is category:
                categories[name] = Category.AS_TRACED
            else:
                raise ValueError(
                    f"{category.value}= takes '{name}' off a list on which it is not; it is on the list "
                    f"'{categories.get(name, Category.AS_TRACED).value}'."
                )
    return written


def _check(category: Category, name: str) -> None:
    """Raises a ValueError if the primitive `name` cannot be on a list."""
    # Deny may name it, since the program computes it in float32. A primitive without a row may be on any
    # list: only its author knows whether it has a half version.
    if (
        category is not Category.DENY
        and name in PRIMITIVES
        and traits_of(name).category is Category.AS_TRACED
    ):
        raise ValueError(
            f"{category.value}= names '{name}', which has no half version: JAX's kernel or rule for it takes "
            f"the dtypes of the program. Leave it out of {category.value}=."
        )


def _entries(option: str, entries: Operations) -> Iterable[str | Primitive]:
    if isinstance(entries, (str, Primitive)):  # A string would be read as a list of its characters.
        raise TypeError(f"{option}= is a list of operations. Got {entries!r}; write {option}=[{entries!r}].")
    if entries is not None and not isinstance(entries, Iterable):
        raise TypeError(f"{option}= is a list of operations, such as ['tanh']. Got {entries!r}.")
    return () if entries is None else entries


def _primitive_name(option: str, entry: str | Primitive) -> tuple[str, bool]:
    """Returns the primitive that a user's entry names, and whether the user takes it off the list."""
    if isinstance(entry, Primitive):
        name, taken_off = entry.name, False
    elif isinstance(entry, str):
        name, taken_off = entry.removeprefix("-"), entry.startswith("-")
    else:
        raise TypeError(
            f"{option}= takes primitives and their names, such as 'exp' or jax.lax.exp_p. Got {entry!r}."
        )
    if traits_of(name).category is Category.CALL:
        raise ValueError(
            f"{option}= names '{name}', which runs other operations. To keep a part of the program in "
            "float32 use rules={'its scope': 'float32'} or full_precision."
        )
    if isinstance(entry, str) and name not in _known_names():
        near = difflib.get_close_matches(name, _known_names(), n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(
            f"{option}= names '{name}', which is not a primitive of JAX; jax.make_jaxpr(fun)(*args) prints "
            f"theirs.{hint} Pass a primitive that JAX does not list itself, not its name."
        )
    return name, taken_off


@functools.cache
def _known_names() -> frozenset[str]:
    """The names of the primitives that JAX makes public, and of those in the table."""
    public = {
        value.name
        for module in (primitives, jax.lax, jax.ad_checkpoint)
        for value in vars(module).values()
        if isinstance(value, Primitive)
    }
    return frozenset(public.union(PRIMITIVES))


def _scopes(
    half: np.dtype, float8: bool, rules: ScopeRules
) -> tuple[tuple[tuple[str, str], ...], frozenset[str]]:
    """Returns the pairs of patterns and dtypes, and the patterns of optional rules."""
    given = rule_pairs(rules)
    # A rule as a pair, or of a mapping, has no field for it, and so has to select something.
    optional = frozenset(each.pattern for each in given if isinstance(each, Rule) and each.optional)
    return tuple(_scope(each, half, float8) for each in given), optional


def _scope(rule: Any, half: np.dtype, float8: bool) -> tuple[str, str]:
    """Returns one rule as its pattern and the name of its dtype."""
    pair = (rule.pattern, rule.policy.compute_dtype) if isinstance(rule, Rule) else rule
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        raise TypeError(
            "rules= maps patterns over scopes to dtypes, as in {'decoder/head': 'float32'}. Got "
            f"{pair!r} as one of them."
        )
    pattern, dtype = pair[0].strip(), pair[1]
    if not pattern.strip("/"):
        raise ValueError("A pattern of rules= is empty. Write a scope such as 'decoder/head'.")
    allowed = (
        f"It may give float32, or the dtype of the autocast ({half.name}) for an exception within a wider "
        f"rule{f', or {FLOAT8!r}' if float8 else ''}."
    )
    # `parse_dtype` does not know for which option it reads, so its error becomes one about this rule.
    try:
        name = FLOAT8 if _is_float8(dtype) else parse_dtype(dtype).name
    except (TypeError, ValueError) as error:
        advice = f" {FLOAT8_ADVICE}" if FLOAT8_ADVICE in str(error) and not float8 else ""
        raise type(error)(f"The rule for '{pattern}' gives {dtype!r}. {allowed}{advice}") from None
    if name not in ("float32", half.name, *([FLOAT8] if float8 else [])):
        raise ValueError(
            f"The rule for '{pattern}' gives {name}. {allowed} For another dtype wrap that part in an "
            "autocast of its own."
        )
    return pattern, name
