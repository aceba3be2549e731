"""With `half_sums`, autocast moves fewer bytes than casts by hand, or a policy, in a transformer's step."""

import functools
import json

import pytest

import jmp_lite as jmp
from benchmarks.arms.jax_arms import JaxArm
from benchmarks.compiled import by_hand, predict
from benchmarks.compiled.h100 import compile_for_gpu
from benchmarks.compiled.pages import RESULTS
from examples.models import FAMILIES
from jmp_lite.programs import read_program


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gpt2-small", "bert-base", "gpt2-medium"])
def test_a_residual_stream_in_half_moves_no_byte_more_than_a_policy(family, monkeypatch):
    arms = json.loads((RESULTS / predict.PRETENDED / f"{family}.json").read_text())["arms"]
    monkeypatch.setattr(jmp, "autocast", functools.partial(jmp.autocast, half_sums="**"))
    workload = FAMILIES[family].full()
    arm = JaxArm("float16 autocast", workload, workload.batch_size)
    compiled = compile_for_gpu(arm.step, *arm.shapes(), donate_argnums=0, pretend=True)
    moved = read_program(compiled).bytes_moved
    assert moved <= arms["float16"]["bytes_moved"]
    assert moved < 0.98 * arms["float16 autocast"]["bytes_moved"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["bert-base", "gpt2-small"])
def test_a_residual_stream_in_half_moves_fewer_bytes_than_casts_by_hand(family):
    casts, ours = (by_hand.program(family, way).bytes_moved for way in ("by hand", [*by_hand.WAYS][-1]))
    assert ours < 0.985 * casts
