"""Policies: the dtypes in which parameters rest, arithmetic runs and results come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._dtypes import DTypeLike, dtype_name, parse_dtype
from ._paths import matches, nearest_paths, path_name
from ._text import Shown, aligned
from ._tree import cast_floating, cast_leaf

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Rule:
    """An exception to a policy, or to `autocast`, for one part of a model.

    Attributes:
        pattern: the subtrees of the parameters that the rule is for, or the scopes under `autocast`: `head`,
            `**/BatchNorm*`, `/decoder/*/norm`. `*` matches any part of one key, `**` matches any number of
            keys. A pattern may begin at any depth unless it starts with a slash.
        policy: the policy of these subtrees. A dtype or a policy string is read as one.
        optional: whether the rule may match nothing.

    Raises:
        ValueError: the pattern is empty or contains `->` or `;`, or the policy has rules of its own.

    Examples:
        >>> jmp.Rule("head", "float32").policy.compute_dtype is jnp.float32
        True
    """

    pattern: str
    policy: Policy
    optional: bool = False

    def __init__(self, pattern: str, policy: Policy | DTypeLike | str, optional: bool = False) -> None:
        if not isinstance(pattern, str):
            raise TypeError(f"Rule(pattern, policy): the pattern is a path such as 'head'. Got {pattern!r}.")
        object.__setattr__(self, "pattern", pattern.strip())
        object.__setattr__(self, "policy", _as_policy(policy))
        object.__setattr__(self, "optional", optional)
        if not self.pattern.strip("/") or "->" in self.pattern or ";" in self.pattern:
            raise ValueError(
                f"A rule's pattern is a path such as 'head' or '**/BatchNorm*', without '->' and "
                f"';'. Got {self.pattern!r}."
            )
        if self.policy.rules:
            raise ValueError(
                f"The policy of rule {self.pattern!r} has rules of its own: {self.policy}. Give "
                "every rule to the outer policy; the first that matches wins."
            )

    def __str__(self) -> str:
        return f"{self.pattern} {'?->' if self.optional else '->'} {self.policy}"


@dataclasses.dataclass(frozen=True, repr=False)
class Policy(Shown):
    """The three dtypes of mixed precision, with rules for the parts of a model that need other dtypes.

    Two policies are equal if their dtypes and rules are, however these were spelled. `get_policy` reads
    `str(policy)` back. The dtypes are the types of `jax.numpy`: `policy.compute_dtype is jnp.float16`.

    Attributes:
        param_dtype: the dtype in which parameters rest. For a half dtype see `with_master_params`.
        compute_dtype: the dtype of the operands of the arithmetic.
        output_dtype: the dtype of what the model returns, such as logits.
        rules: `Rule`s, or a mapping or pairs of pattern and policy; None for none. The first rule that
            matches the path of a parameter wins.

    Raises:
        ValueError, TypeError: a dtype is unknown or not floating, or a rule is malformed.

    Examples:
        >>> policy = jmp.Policy("float32", jnp.float16, "float32")
        >>> str(policy)
        'p=full,c=f16,o=full'
        >>> policy == jmp.get_policy("params=float32, compute=float16, output=float32")
        True
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike
    # Keyword-only, so that a subclass can add fields without defaults, as subclasses of jmp's policy do.
    rules: Any = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            # The type that `jax.numpy` has for the dtype. The dataclass is frozen.
            object.__setattr__(self, field, getattr(jnp, parse_dtype(getattr(self, field)).name))
        object.__setattr__(self, "rules", tuple(map(_as_rule, rule_pairs(self.rules))))

    def cast_to_param(self, x: T) -> T:
        """Casts the floating leaves of the tree `x` to the parameter dtype, after `check_rules(x)`."""
        self.check_rules(x)
        return self._cast(x, "param_dtype")

    def cast_to_compute(self, x: T) -> T:
        """Casts the floating leaves of the tree `x` to the compute dtype.

        If a parameter is cast once and used many times (a bias, an embedding row, a weight inside a scan),
        its gradients are summed in the compute dtype. Keep such a parameter in float32 with a rule and cast
        it where it is used, or leave the casts to `linen.with_policy` or `nnx.with_policy`.

        A rule may match no leaf of `x`, such as a batch: `check_rules(params)` finds a misspelled rule.

        Examples:
            >>> policy = jmp.get_policy("c=bf16").with_rules({"head": "float32"})
            >>> params = {"body": jnp.ones(2), "head": jnp.ones(2)}
            >>> jax.tree.map(lambda x: x.dtype.name, policy.cast_to_compute(params))
            {'body': 'bfloat16', 'head': 'float32'}
        """
        return self._cast(x, "compute_dtype")

    def cast_to_output(self, x: T) -> T:
        """Casts the floating leaves of the tree `x` to the output dtype."""
        return self._cast(x, "output_dtype")

    def with_output_dtype(self, output_dtype: DTypeLike) -> Policy:
        """Returns the policy with the output dtype `output_dtype`."""
        return dataclasses.replace(self, output_dtype=parse_dtype(output_dtype))

    def with_rules(self, rules: Mapping[str, Any] | Iterable[Any] | None) -> Policy:
        """Returns the policy with `rules` in front of its own.

        Args:
            rules: `Rule`s, or a mapping or pairs of pattern and policy, dtype or policy string; or None.

        Examples:
            >>> str(jmp.get_policy("half").with_rules({"**/BatchNorm*": "float32"}))
            'p=f16,c=f16,o=f16; **/BatchNorm* -> p=full,c=full,o=full'
        """
        return dataclasses.replace(self, rules=[*rule_pairs(rules), *self.rules])

    def at(self, name: str) -> Policy:
        """Returns the policy of the leaf or subtree `name`, which has no rules."""
        return self._at_any([name])

    def check_rules(self, params: Any) -> None:
        """Checks that every rule that is not optional matches a leaf of `params`, or raises a ValueError.

        Examples:
            >>> policy = jmp.get_policy("c=f16").with_rules({"haed": "float32"})
            >>> policy.check_rules({"head": {"kernel": jnp.ones(2)}})  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ...
            ValueError: The rule 'haed -> ...' matches no parameter. Nearest: 'head', 'head/kernel'.
        """
        leaves = jax.tree_util.tree_leaves_with_path(params) if self.rules else []
        names = [name for path, _ in leaves for name in _names(params, path)]
        for rule in self.rules:
            if rule.optional or any(matches(rule.pattern, name) for name in names):
                continue
            near = nearest_paths(rule.pattern, names)
            raise ValueError(f"The rule '{rule}' matches no parameter. Nearest: {near}.")

    def _cast(self, tree: T, field: str) -> T:
        if not self.rules:
            return cast_floating(tree, getattr(self, field))

        def cast(path: tuple[Any, ...], leaf: Any) -> Any:
            return cast_leaf(leaf, getattr(self._at_any(_names(tree, path)), field))

        return jax.tree_util.tree_map_with_path(cast, tree)

    def _at_any(self, names: list[str]) -> Policy:
        for rule in self.rules:
            if any(matches(rule.pattern, name) for name in names):
                return rule.policy
        return dataclasses.replace(self, rules=())

    def _notebook_text(self) -> str:
        dtypes = {"parameters": self.param_dtype, "compute": self.compute_dtype, "output": self.output_dtype}
        rows = [(name, np.dtype(dtype).name) for name, dtype in dtypes.items()]
        return "\n".join(aligned([*rows, *((rule.pattern, str(rule.policy)) for rule in self.rules)], left=2))

    def __repr__(self) -> str:
        # The string of O2 has 240 characters. The patterns come first: O2 has the half dtype of the backend,
        # which must not start before `jax.distributed.initialize`.
        has_patterns = tuple(rule.pattern for rule in self.rules) == _NORMALIZATION
        is_o2 = has_patterns and self == get_policy("O2")
        return f"get_policy({'O2' if is_o2 else str(self)!r})"

    def __str__(self) -> str:
        dtypes = (self.param_dtype, self.compute_dtype, self.output_dtype)
        names = (dtype_name(np.dtype(dtype)) for dtype in dtypes)
        dtypes = ",".join(f"{key}={name}" for key, name in zip("pco", names))
        return "; ".join([dtypes, *map(str, self.rules)])  # `get_policy` reads it back.


# Apex's levels (https://nvidia.github.io/apex/amp.html). Apex finds normalization layers by their class. A
# parameter tree has only names, so these are the names that Flax gives them, and other common names.
_NORMALIZATION = ("*[Nn]orm*", "[Bb][Nn]", "[Bb][Nn][0-9_]*", "[Ll][Nn]", "[Ll][Nn][0-9_]*")
_MIXED = {dtype: f"p=full,c={dtype},o=full" for dtype in ("f16", "bf16")}
_PRESETS = {
    "O0": "full",
    "O1": "p=full,c=half,o=full",
    "O2": "; ".join(["p=half,c=half,o=full", *(f"{n} ?-> p=full,c=full,o=half" for n in _NORMALIZATION)]),
    "O3": "half",
    # Keras's and Lightning's names.
    "mixed_float16": _MIXED["f16"],
    "mixed_bfloat16": _MIXED["bf16"],
    "16-mixed": _MIXED["f16"],
    "bf16-mixed": _MIXED["bf16"],
}
_KEYS = {"p": 0, "params": 0, "c": 1, "compute": 1, "o": 2, "output": 2}


def get_policy(policy_name: str) -> Policy:
    """Returns the policy that a string describes.

    Args:
        policy_name: one of these, with spaces anywhere between the words.

            - `"params=float32,compute=float16,output=float32"`, or short `"p=f32,c=f16,o=f32"`.
              By default params is float32, compute is that of params, and output is that of compute;
            - one dtype for all three: `"float32"`, `"half"`, `"bf16"`, `"fp16"`;
            - a level of Apex: `"O0"` float32; `"O1"` float32 parameters, half compute; `"O2"` half
              parameters, float32 normalization layers, which it knows by names such as `LayerNorm_0`,
              `norm1`, `bn` or `ln_2`; `"O3"` all half. With O2, wrap the optimizer in `with_master_params`,
              so that small updates are not lost;
            - a name of Keras or Lightning: `"mixed_float16"`, `"16-mixed"`, `"mixed_bfloat16"`,
              `"bf16-mixed"`, all with float32 parameters and outputs;
            - any of these followed by rules: `"c=f16,o=f32; head -> float32; **/Norm* ?-> f32"`.
              `?->` marks a rule that may match nothing.

    Raises:
        ValueError: a key or dtype is unknown, or a key is given twice.
        TypeError: `policy_name` is not a string.

    Examples:
        >>> str(jmp.get_policy("O1"))
        'p=full,c=f16,o=full'
    """
    if not isinstance(policy_name, str):
        raise TypeError(
            "get_policy takes a string such as 'params=float32,compute=float16,output=float32' or 'O1'. Got "
            f"{policy_name!r}. For a policy of dtypes: jmp.Policy(jnp.float32, jnp.float16, jnp.float32)."
        )
    head, *rules = (part.strip() for part in policy_name.split(";"))
    dtypes, *preset_rules = (part.strip() for part in _PRESETS.get(head, head).split(";"))
    # Those of the string come first, because the first rule that matches wins.
    return Policy(*_read_dtypes(dtypes), rules=[_read_rule(rule) for rule in rules + preset_rules])


def rule_pairs(rules: Any) -> list[Any]:
    """Returns what a user gave as rules as a list of rules or pairs; None is none."""
    if rules is None:
        return []
    if isinstance(rules, Mapping):
        return list(rules.items())
    # A string is an iterable too, of letters.
    if isinstance(rules, (str, Rule)) or not isinstance(rules, Iterable):
        raise TypeError(
            f"rules= takes a mapping, such as {{'head': 'float32'}}, or a list of jmp.Rule. Got {rules!r}."
        )
    return list(rules)


def _names(tree: Any, path: tuple[Any, ...]) -> list[str]:
    """Returns the names by which a rule may select the leaf at `path`."""
    # In the tuple `(params, x)`, "/head" means `params["head"]`: the index is no part of the name.
    return [path_name(path), *([path_name(path[1:])] if type(tree) is tuple else [])]


def _as_rule(rule: Any) -> Rule:
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
        raise TypeError(f"A rule is a jmp.Rule or a pair of pattern and policy. Got {rule!r}.")
    return Rule(*rule)


def _read_dtypes(text: str) -> list[np.dtype]:
    """Returns the dtypes of parameters, compute and output from a policy string without rules."""
    if "=" not in text:
        try:
            return [parse_dtype(text)] * 3
        except ValueError as error:
            raise ValueError(f"{error} Or one of the policies {list(_PRESETS)}.") from None
    given: dict[int, np.dtype] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS:
            raise ValueError(f"Unknown key '{key}' in '{text}' should be 'params', 'compute' or 'output'.")
        if _KEYS[key] in given:
            raise ValueError(f"The key '{key}' is given twice in '{text}'.")
        given[_KEYS[key]] = parse_dtype(value)
    # The defaults are those of jmp.
    param = given.get(0, np.dtype(jnp.float32))
    compute = given.get(1, param)
    return [param, compute, given.get(2, compute)]


def _read_rule(text: str) -> Rule:
    pattern, arrow, policy = text.partition("->")
    if not arrow:
        raise ValueError(f"A rule reads 'pattern -> policy'. Got {text!r}.")
    # In `head ?-> f32` the rule is optional. In `hea?-> f32` the question mark belongs to the pattern.
    optional = pattern.endswith("?") and pattern[:-1] != pattern[:-1].rstrip()
    pattern = pattern[:-1] if optional else pattern
    return Rule(pattern.strip(), Policy(*_read_dtypes(policy.strip())), optional)


def _as_policy(spec: Any) -> Policy:
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, str):
        return get_policy(spec)
    return Policy(spec, spec, spec)
