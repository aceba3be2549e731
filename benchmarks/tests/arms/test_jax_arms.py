"""The arms of JAX: what an arm claims is checked, it learns, and it recovers from an overflow."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.arms.jax_arms import JAX_ARMS, JaxArm, Precision, check_lowered
from benchmarks.arms.loss_scalers import SCALERS
from examples.models import FAMILIES, resnet

GPT, NEUMF = FAMILIES["gpt2-small"].small(), FAMILIES["neumf"].small()


@functools.cache
def loss_at_the_start():
    inputs, targets = NEUMF.batch(0)
    return float(NEUMF.loss(NEUMF.model.apply(NEUMF.init(0), *inputs), targets))


@pytest.mark.cases(fast=5, slow=0)
@pytest.mark.parametrize("name", JAX_ARMS)
def test_an_arm_compiles_to_what_it_claims_learns_and_recovers_from_an_overflow(name):
    arm = JaxArm(name, NEUMF, NEUMF.batch_size)
    facts = arm.compile()
    assert sum(facts["products"].values()) >= 3 * 2
    first = arm.steps(1)
    assert first == pytest.approx(loss_at_the_start(), rel=2**-10)
    assert arm.steps(20) < first
    scales = arm.overflow(2.0**40, 60)
    if JAX_ARMS[name].scaler == "plain":
        assert scales is None
    else:
        skipped = len(scales) - 2
        assert 10 < skipped < 40
        np.testing.assert_array_equal(scales, [2.0**40 / 2**k for k in [*range(skipped + 1), skipped]])
        assert np.isfinite(arm.steps(1))


@pytest.mark.parametrize(
    ("name", "claimed"), [("float32", "f16"), ("float16", "f32"), ("bfloat16", "f16"), ("float32", "tf32")]
)
def test_an_arm_that_is_not_what_it_claims_is_found_out(name, claimed):
    arm = JaxArm(name, GPT, 4)
    text = jax.jit(arm.step).lower(*arm.shapes()).as_text()
    check_lowered(text, arm.precision)
    with pytest.raises(AssertionError, match=f"claimed {claimed}"):
        check_lowered(text, Precision(claimed))


def test_statistics_are_kept_when_a_step_is_skipped():
    model = resnet.ResNet(classes=10, stages=(1,), features=4, stem=3)
    workload = dataclasses.replace(FAMILIES["resnet50"].small(), model=model)
    for name in ("float16", "float16 jmp", "float16 Flax DynamicScale"):
        arm = JaxArm(name, workload, 8)
        params, state, statistics = arm.initial_state(2.0**40)
        (new_params, _, new_statistics), _ = jax.jit(arm.step)(
            (params, state, statistics), workload.batch(0, 8)
        )
        for new, old in zip(
            jax.tree.leaves((new_params, new_statistics)), jax.tree.leaves((params, statistics))
        ):
            np.testing.assert_array_equal(new, old)


def test_every_way_to_scale_takes_the_same_step():
    """The faults of the peers are in tests/core/scaling/test_peers.py."""
    steps = []
    for make in SCALERS.values():
        scaler = make(GPT.optimizer())
        params = {"w": jnp.float32(0.5)}
        loss = lambda params: (jnp.square(params["w"] * 3), {"seen": params["w"]})
        state = scaler.init(params, 2.0**15)
        params, state, statistics, value = scaler.step(loss, params, state, {"seen": jnp.float32(0)})
        steps.append((float(params["w"]), float(statistics["seen"]), float(value)))
        assert float(scaler.scale(state)) in (1.0, 1024.0, 2.0**15)
    assert steps == [steps[0]] * len(SCALERS)
