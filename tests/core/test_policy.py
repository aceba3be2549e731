"""Policies: spelling, strings, presets, and what programs written for jmp do with them."""

import copy
import dataclasses
import pickle
from typing import Any

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jmp_lite
import jmp_lite as jmp
from jmp_lite._dtypes import parse_dtype
from tests.support.policy_names import BF16, F16, F32, F64, dtypes_of

SPELLINGS = [np.float16, jnp.float16, np.dtype("float16"), "f16", "float16"]


def test_policies_are_equal_whatever_way_the_dtypes_were_spelt():
    reference = jmp.Policy("f32", "f16", jnp.float32)
    for spelling in SPELLINGS:
        policy = jmp.Policy(np.float32, spelling, "full")
        assert policy == reference
        assert len({policy, reference}) == 1
        assert jmp.Policy(spelling, "f32", "f32") != reference
        ruled = reference.with_rules({"head": spelling})
        assert ruled == reference.with_rules([jmp.Rule("head", jmp.get_policy("f16"))])
        assert hash(ruled) == hash(reference.with_rules([("head", "float16")]))
        assert ruled != reference


def test_policies_are_frozen_and_copied_and_pickled():
    policy = jmp.get_policy("O2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = F32
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.rules[0].pattern = "x"
    for same in (
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
        copy.copy(policy),
        dataclasses.replace(policy),
    ):
        assert same == policy


# Strings


dtype_names = st.sampled_from(["f16", "bf16", "full", "f64", "float8_e4m3fn"])


patterns = st.lists(
    st.sampled_from(["head", "**", "*", "Batch*Norm", "layer_[0-9]", "x?", "?", "a b"]),
    min_size=1,
    max_size=3,
).map("/".join)


plain_policies = st.builds(jmp.Policy, dtype_names, dtype_names, dtype_names)


rules = st.builds(
    jmp.Rule,
    st.booleans().flatmap(lambda root: patterns.map(lambda p: "/" * root + p)),
    plain_policies,
    st.booleans(),
)


policies = st.builds(jmp.Policy, dtype_names, dtype_names, dtype_names, rules=st.lists(rules, max_size=4))


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(policy=policies)
def test_str_is_read_back(policy):
    again = jmp.get_policy(str(policy))
    assert again == policy
    assert str(again) == str(policy)
    assert hash(again) == hash(policy)


def test_repr_is_a_short_call_that_makes_the_policy_and_str_is_that_of_jmp():
    for name in ("O0", "O1", "O2", "bf16", "c=f16; head -> float32"):
        policy = jmp.get_policy(name)
        assert eval(repr(policy), {"get_policy": jmp.get_policy}) == policy
        assert len(repr(policy)) < 80
    assert repr(jmp.get_policy("O2")) == "get_policy('O2')"
    assert str(jmp.Policy(jnp.float32, jnp.float16, jnp.bfloat16)) == "p=full,c=f16,o=bf16"


DTYPES_OF_TEXT = {
    (F32, F16, F32): (
        *("params=float32,compute=float16,output=float32", "p=f32,c=f16,o=f32", "c=half,o=full"),
        *(" params = float32 , compute = float16 , output = float32 ", "c=fp16,o=fp32"),
        *("O1", "mixed_float16", "16-mixed"),
    ),
    (F16, F16, F16): ("p=f16", "half", "fp16", "O3", " O3 "),
    (F32, F32, F32): ("float32", "O0"),
    (F16, F16, F32): ("p=f16,o=f32", "O2"),
    (F32, BF16, F32): ("o=f32, c=bf16", "mixed_bfloat16", "bf16-mixed; head -> f32"),
    (F32, F16, F16): ("c=f16",),
    (F32, F32, F16): ("o=f16",),
    (BF16, BF16, BF16): (" bf16 ",),
    (F64, F64, F64): ("f64",),
}


def test_a_string_gives_its_dtypes():
    for expected, texts in DTYPES_OF_TEXT.items():
        assert {text: dtypes_of(jmp.get_policy(text)) for text in texts} == dict.fromkeys(texts, expected)


def test_half_in_presets_is_that_of_the_backend(monkeypatch):
    class Device:
        platform = "tpu"

    monkeypatch.setattr("jax.local_devices", lambda: [Device])
    assert dtypes_of(jmp.get_policy("O1")) == (F32, BF16, F32)
    assert dtypes_of(jmp.get_policy("O3; head -> half")) == (BF16, BF16, BF16)


def test_rules_are_read_with_any_spaces_and_keep_their_order():
    spaced = jmp.get_policy(" c=f16 , o=f32 ;  head->float32 ;**/Norm* ?->  p=f32, c=bf16 ")
    assert spaced.rules == (jmp.Rule("head", "f32"), jmp.Rule("**/Norm*", "c=bf16", optional=True))
    assert jmp.get_policy("O1; head -> f32").rules == (jmp.Rule("head", "f32"),)


def test_a_question_mark_that_touches_the_pattern_belongs_to_it():
    assert jmp.get_policy("f16; layer_? -> f32").rules == (jmp.Rule("layer_?", "f32"),)
    assert jmp.get_policy("f16; layer_?-> f32").rules == (jmp.Rule("layer_?", "f32"),)
    assert jmp.get_policy("f16; layer_? ?-> f32").rules == (jmp.Rule("layer_?", "f32", optional=True),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute_float16", "Unknown dtype 'compute_float16'"),
        ("c=f17", "Unknown dtype 'f17'"),
        ("O4", "Unknown dtype 'O4'"),
        ("", "Unknown dtype ''"),
        ("c=f16,x=f32", "Unknown key 'x' in 'c=f16,x=f32' should be 'params', 'compute' or 'output'"),
        ("c=f16,compute=f32", "The key 'compute' is given twice in 'c=f16,compute=f32'"),
        ("c=f16,", "Unknown key ''"),
        ("c=f16; head", "A rule reads 'pattern -> policy'. Got 'head'"),
        ("c=f16; -> f32", "A rule's pattern is a path"),
        ("c=f16; / -> f32", "A rule's pattern is a path"),
        ("c=f16; head -> f17", "Unknown dtype 'f17'"),
        ("c=f16;", "A rule reads"),
    ],
)
def test_a_string_that_says_nothing_sensible_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        jmp.get_policy(text)


def test_a_pattern_is_a_path_that_can_be_read_back():
    for pattern in ("", "/", "a -> b", "a; b"):
        with pytest.raises(ValueError, match="A rule's pattern is a path such as"):
            jmp.Rule(pattern, "f32")
    with pytest.raises(TypeError, match=r"the pattern is a path such as 'head'\. Got 3"):
        jmp.Rule(3, "f32")
    for pattern in (" head", "head ", "head ?", "\thead"):
        try:
            policy = jmp.get_policy("f16").with_rules({pattern: "f32"})
        except ValueError:
            continue
        assert jmp.get_policy(str(policy)) == policy


def test_a_rule_within_a_rule_is_a_value_error():
    with pytest.raises(ValueError, match="The policy of rule 'head' has rules of its own"):
        jmp.Rule("head", jmp.get_policy("f16; a -> f32"))


def test_get_policy_reads_strings_alone():
    for spec in (None, jnp.float16, {"c": "f16"}, 16):
        with pytest.raises(TypeError, match=r"get_policy takes a string such as .*For a policy of dtypes"):
            jmp.get_policy(spec)


def test_rules_are_a_mapping_or_a_list_of_rules_or_pairs():
    for rules in ("head", jmp.Rule("head", "f32"), 3):
        for give in (lambda r: jmp.Policy("f32", "f16", "f32", rules=r), jmp.get_policy("O1").with_rules):
            with pytest.raises(TypeError, match=r"rules= takes a mapping, such as .*Got"):
                give(rules)
    for rule in ("head", ("head",), 3, ("head", "f32", "f32")):
        with pytest.raises(TypeError, match=r"A rule is a jmp\.Rule or a pair of pattern and policy\. Got"):
            jmp.Policy("f32", "f16", "f32", rules=[rule])


# What public programs that use jmp do with a policy


def test_the_dtypes_are_those_objects_of_jax():
    policy = jmp.Policy("float32", np.dtype("float16"), jnp.bfloat16)
    assert policy.param_dtype is jnp.float32
    assert policy.compute_dtype is jnp.float16
    assert policy.output_dtype is jnp.bfloat16
    assert {jnp.float16: "half", jnp.float32: "full"}[policy.compute_dtype] == "half"
    assert policy.compute_dtype(3).dtype == jnp.float16
    for name in ("f64", "float8_e4m3fn", "float8_e5m2"):
        kept = jmp.get_policy(name).compute_dtype
        assert kept is getattr(jnp, np.dtype(kept).name)


def test_a_subclass_may_add_a_field_without_a_default():
    @dataclasses.dataclass(frozen=True)
    class WithReduction(jmp.Policy):
        reduce_ops_dtype: Any

    policy = WithReduction("f32", "f16", "f32", jnp.float32)
    assert (policy.compute_dtype, policy.reduce_ops_dtype, policy.rules) == (jnp.float16, jnp.float32, ())
    by_name = WithReduction(
        param_dtype="f32", compute_dtype="f16", output_dtype="f32", reduce_ops_dtype=1, rules={"head": "f32"}
    )
    assert by_name.with_output_dtype("f16").output_dtype is jnp.float16
    assert by_name.cast_to_compute({"head": jnp.ones(2), "body": jnp.ones(2)})["head"].dtype == jnp.float32


def test_dtypes_that_are_not_floating_are_a_type_error():
    for bad in (jnp.int32, None, 3):
        with pytest.raises(TypeError, match="Expected a"):
            jmp.Policy("f32", bad, "f32")
        with pytest.raises(TypeError, match="Expected a"):
            jmp.get_policy("f32").with_output_dtype(bad)


def test_with_output_dtype_changes_the_output_alone_and_keeps_rules():
    policy = jmp.get_policy("c=f16; head -> f32")
    changed = policy.with_output_dtype(jnp.bfloat16)
    assert dtypes_of(changed) == (F32, F16, BF16)
    assert changed.rules == policy.rules
    assert policy.output_dtype == F16


def test_an_unknown_preset_lists_the_presets_and_one_for_fp8_is_answered_with_autocast():
    for name in ("mixed_float8", "O4", "fp8-mixed"):
        said = rf"Unknown dtype '{name}'.*Or one of the policies \['O0', .*'bf16-mixed'\]"
        with pytest.raises(ValueError, match=said):
            jmp.get_policy(name)
    for name in ("mixed_float8", "fp8-mixed", "c=float8"):
        with pytest.raises(ValueError, match=r"use jmp.autocast\(loss_fn, 'float8'\)"):
            jmp.get_policy(name)
    for name, unsaid in (("c=float8", "O1"), ("mixed_float7", "autocast")):
        with pytest.raises(ValueError, match="Unknown dtype") as error:
            jmp.get_policy(name)
        assert unsaid not in str(error.value)


# Names of dtypes


def test_half_is_float16_on_cpu_and_gpu_and_bfloat16_on_a_tpu(monkeypatch):
    class Device:
        platform = "cpu"

    monkeypatch.setattr("jax.local_devices", lambda: [Device])
    for Device.platform, expected in (("cpu", jnp.float16), ("gpu", jnp.float16), ("tpu", jnp.bfloat16)):
        assert jmp_lite.half_dtype() == expected
        assert parse_dtype("half") == expected


# NumPy alone would read the last four: as float64, as an object, as float32 and as float64.
def test_an_unknown_name_is_a_value_error_that_lists_the_names():
    for spec in ("float17", "compute_float16", "", "F16 ", "f8", "O4", "<f4", "d"):
        with pytest.raises(ValueError, match=f"Unknown dtype '{spec}'. It should be one of .*'half', 'bf16'"):
            parse_dtype(spec)


def test_other_values_than_floating_dtypes_are_a_type_error_that_says_why():
    for spec in (None, 3, object(), [1], {"**": "fp8"}):
        with pytest.raises(TypeError, match="Expected a dtype or one of"):
            parse_dtype(spec)
    for spec in (np.int32, "int8", bool, jnp.complex64, "uint32"):
        said = r"Expected a floating dtype\. Got .* A policy casts floating values only"
        with pytest.raises(TypeError, match=said):
            parse_dtype(spec)
