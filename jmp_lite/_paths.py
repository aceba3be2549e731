"""Names for the leaves of a pytree, and patterns over those names.

A leaf's name is its key path with the keys joined by slashes: `encoder/layers/0/kernel`. Dict keys,
attributes and indices look alike, so one pattern fits a Linen dict, an NNX state and an Equinox
module.
"""

import difflib
import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax


def path_name(key_path: tuple[Any, ...]) -> str:
    """Returns the name of a `jax.tree_util` key path, such as `head/kernel`."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def join(path: str, name: str) -> str:
    """Returns the name of `name` within the subtree `path`, which is empty at the root."""
    return f"{path}/{name}" if path else name


def leaf_names(tree: Any) -> tuple[str, ...]:
    """Returns the names of the leaves of `tree`, in the order of `jax.tree.leaves`."""
    return tuple(name for name, _ in named_leaves(tree))


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of `tree` with their names, in the order of `jax.tree.leaves`."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def shown(value: Any) -> str:
    """Returns, for an error, what a value is; of a tree its first leaves and how many there are."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype.name}{list(value.shape)}"
    if names := [name for name in leaf_names(value) if name]:
        # The first leaves tell which tree it is; its text could fill pages.
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"a {type(value).__name__} with {', '.join(map(repr, names[:3]))}{more}"
    return f"{value!r:.200}" if type(value).__repr__ is not object.__repr__ else type(value).__name__


def shown_difference(given: Any, expected: Any) -> str:
    """Returns, for an error, by which leaves two trees of different structures differ: the first ones."""
    new, old = set(leaf_names(given)), set(leaf_names(expected))
    parts = [(sorted(new - old), "only in the first"), (sorted(old - new), "only in the second")]
    said = [f"{len(n)} {where}, {', '.join(map(repr, n[:3]))}" for n, where in parts if n]
    kinds = f"{type(given).__name__} and {type(expected).__name__}"
    return "; ".join(said) or f"they have the same leaves in other containers, {kinds}"


def positional_names(fun: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that a call may give by position, without `*args`."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # Some built-in functions have none.
        parameters = ()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def argument_names(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[str, ...]:
    """Returns the names of the leaves of a call's arguments, such as `params/w`, or `1` of `*args`."""
    names = positional_names(fun)

    def name(path: tuple[Any, ...]) -> str:
        # The path of a leaf of `(args, kwargs)` begins with 0 for an argument that is given by position.
        given_by_name, first, *rest = path
        if not given_by_name.idx and first.idx < len(names):
            first = jax.tree_util.GetAttrKey(names[first.idx])
        return path_name((first, *rest))

    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_leaf)
    return tuple(name(path) for path, _ in leaves)


def subtrees(name: str) -> Iterator[str]:
    """Yields the subtrees that hold a leaf, the outermost first: `head`, then `head/kernel` itself."""
    keys = name.split("/")
    for depth in range(1, len(keys) + 1):
        yield "/".join(keys[:depth])


def nearest_paths(pattern: str, names: Iterable[str]) -> str:
    """Returns, for an error, at most four subtrees of the leaves `names` that look most like `pattern`."""
    paths = list(dict.fromkeys(path for name in names for path in subtrees(name)))
    near = difflib.get_close_matches(pattern.strip("*/"), paths, n=4, cutoff=0.3) or paths[:4]
    return ", ".join(map(repr, near)) or "none"


def as_patterns(patterns: str | Iterable[str], takes: str) -> tuple[str, ...]:
    """Returns one pattern or several as a tuple. The message of an error begins with `takes`."""
    if isinstance(patterns, Mapping):
        raise TypeError(f"{takes}, without values. Got {patterns!r:.200}; pass {list(patterns)!r:.200}.")
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{takes}. Got {patterns!r:.200}.")
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"{takes}. Got {pattern!r:.200} as one of them.")
        if not pattern.strip(" /"):
            raise ValueError(f"{takes}. Got an empty pattern, {pattern!r}.")
    return given


@functools.lru_cache(maxsize=1 << 16)  # Each operation of a scope asks again.
def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` selects the leaf or subtree `name`.

    `*`, `?` and `[abc]` match within one key, `**` matches any number of keys. A pattern selects a whole
    subtree, so `head` means `head/**`. It may begin at any depth unless it starts with a slash, as in a
    `.gitignore` file. Case matters, and spaces around a pattern do not.

    This is the language of all patterns: over scopes, parameters, and paths of a state.
    """
    # A pattern that may begin at any depth is one that begins with any number of keys.
    pattern = pattern.strip()
    anchored = pattern.startswith("/")
    keys = tuple(pattern.strip("/").split("/"))
    return _match(keys if anchored else ("**", *keys), tuple(name.split("/")))


def _match(pattern: tuple[str, ...], keys: tuple[str, ...]) -> bool:
    if not pattern:
        return True  # The rest of the name lies inside the selected subtree.
    if pattern[0] == "**":
        # `**` may stand for no key at all.
        return any(_match(pattern[1:], keys[skip:]) for skip in range(len(keys) + 1))
    return bool(keys) and fnmatch.fnmatchcase(keys[0], pattern[0]) and _match(pattern[1:], keys[1:])


# https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/ad_checkpoint.py#L809
RECOMPUTED = "rematted_computation"
"""The scope that JAX adds to what a backward pass computes again."""


def plain_scope(name_stack: str) -> str:
    """Returns a name stack of JAX without transforms: `decoder/head` for `jvp(decoder)/head`."""
    # JAX writes its transforms around a scope, as in `transpose(jvp(decoder))/head`.
    scopes = re.sub(r"\w+\(|\)", "", name_stack) if "(" in name_stack else name_stack
    return "/".join(name for name in scopes.split("/") if name and name != RECOMPUTED)


def visible_scope(scope: str) -> str:
    """Returns a scope without the names that only autocast reads."""
    return "/".join(name for name in scope.split("/") if not name.startswith("jmp_lite."))
