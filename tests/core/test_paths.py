"""Names of leaves, and which patterns select them."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from jmp_lite._paths import leaf_names, matches, path_name, subtrees


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: object
    bias: object


def test_dict_keys_attributes_and_indices_have_the_same_form():
    tree = {"encoder": [Layer(0, 1), {"kernel": 2}], "head": (3,)}
    names = ("encoder/0/kernel", "encoder/0/bias", "encoder/1/kernel", "head/0")
    assert leaf_names(tree) == names
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert tuple(map(path_name, paths)) == names


def test_none_has_no_name_and_a_bare_leaf_the_empty_one():
    assert leaf_names({"a": None, "b": 1}) == ("b",)
    assert leaf_names(jnp.ones(2)) == ("",)
    assert leaf_names({}) == ()


def test_subtrees_go_from_the_outermost_to_the_leaf():
    assert list(subtrees("a/b/c")) == ["a", "a/b", "a/b/c"]


MATCHES = [
    ("head", "head/kernel", True),
    ("head", "head", True),
    ("head", "encoder/head/kernel", True),
    ("/head", "encoder/head/kernel", False),
    ("/head", "head/kernel", True),
    ("head/**", "head/kernel", True),
    ("head/", "head/kernel", True),
    ("head", "header/kernel", False),
    ("head*", "header/kernel", True),
    ("**/BatchNorm*", "stem/BatchNorm_0/scale", True),
    ("**/BatchNorm*", "BatchNorm_0/scale", True),
    ("**/BatchNorm*", "stem/batchnorm/scale", False),
    ("encoder/*/kernel", "encoder/0/kernel", True),
    ("encoder/*/kernel", "encoder/0/1/kernel", False),
    ("encoder/**/kernel", "encoder/0/1/kernel", True),
    ("encoder/**/kernel", "encoder/kernel", True),
    ("kernel", "head/kernel", True),
    ("head/bias", "head/kernel", False),
    ("layer_?", "layer_1/kernel", True),
    ("layer_?", "layer_12/kernel", False),
    ("layer_[12]", "layer_1/kernel", True),
    ("layer_[12]", "layer_3/kernel", False),
    ("**", "anything/at/all", True),
    ("*", "anything/at/all", True),
    ("a/b", "a/c/b", False),
    ("a/b", "x/a/b/y", True),
]


def test_a_pattern_selects_what_it_says():
    assert [case for case in MATCHES if matches(*case[:2]) is not case[2]] == []


keys = st.text("abcN_0", min_size=1, max_size=4)
names = st.lists(keys, min_size=1, max_size=5).map("/".join)


@hypothesis.given(name=names)
def test_every_subtree_selects_the_leaf_it_holds(name):
    for subtree in subtrees(name):
        assert matches(subtree, name)
        assert matches("/" + subtree, name)
        assert not matches("/x/" + subtree, name)


@hypothesis.given(name=names, prefix=names)
def test_only_a_slash_ties_a_pattern_to_the_root(name, prefix):
    assert matches(name, f"{prefix}/{name}")
    assert matches("/" + name, f"{prefix}/{name}") == f"{prefix}/{name}/".startswith(f"{name}/")
