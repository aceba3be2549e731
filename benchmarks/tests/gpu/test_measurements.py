"""What single pieces measure: the machine, the time of a loss scale, the targets of products."""

import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks.arms.loss_scalers import SCALERS
from benchmarks.gpu import attention_time, compile_arm, float8_time, machine, scale_time


def test_the_machine_is_checked_and_its_ceilings_are_measured(monkeypatch):
    assert 0 < machine.check() < 60
    found = machine.ceilings(64)
    assert found.keys() == {"copy", *machine.PRECISIONS}
    assert all(rate > 0 for rate in found.values())
    report = machine.report()
    assert report["cores"] >= 1
    assert report["memory_bytes"] > 2**28
    assert report["jax_devices"] == [device.device_kind for device in jax.devices()]
    monkeypatch.setattr(machine, "HAS_GPU", True)
    with pytest.raises(RuntimeError, match="has a GPU, and JAX sees"):
        machine.check()


def test_the_loss_scales_are_timed_in_turn_and_one_that_is_not_installed_says_so(monkeypatch):
    real = scale_time.importlib.util.find_spec
    monkeypatch.setattr(
        scale_time.importlib.util, "find_spec", lambda name: None if name == "jmp" else real(name)
    )
    scalers = {name: SCALERS[name] for name in ("plain", "jmp 0.0.4", "jmp_lite")}
    monkeypatch.setattr(scale_time, "SCALERS", scalers)
    found = scale_time.measure({"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}, steps=2, blocks=3)
    assert list(found) == list(scalers)
    assert found["jmp 0.0.4"] == {"error": "not installed: jmp"}
    assert found["plain"]["times_plain"] == 1
    assert len(found["jmp_lite"]["ms_blocks"]) == 3
    assert found["jmp_lite"]["kernels"] >= found["plain"]["kernels"] > 0
    lines = scale_time.table({"arms": found}).splitlines()
    assert lines[2].split() == ["jmp", "0.0.4", "not", "installed:", "jmp"]
    assert f"{found['jmp_lite']['ms']:.3f}" in lines[3]


def test_products_are_counted_by_what_runs_them_and_those_without_a_name_are_seen():
    product = lambda target, arithmetic, times, operation: types.SimpleNamespace(
        target=target, arithmetic=arithmetic, times=times, operation=operation
    )
    program = types.SimpleNamespace(
        matmuls=[
            product("dot", "f16", 12, "step/dot"),
            product("cublas", "f16", 2, "a"),
            product("dot", "f16", 1, ""),
        ]
    )
    assert compile_arm.targets(program) == {"dot f16": 13, "cublas f16": 2, "without a name": 1}


def test_float8_is_compared_with_bfloat16_each_at_its_fastest():
    arm = lambda *blocks: {"ms": blocks[1], "ms_blocks": list(blocks)}
    found = {
        "bfloat16, Triton's GEMMs off": arm(9.0, 10.0, 11.0),
        "bfloat16, Triton's GEMMs on": arm(6.0, 6.0, 6.0),
        "float8, Triton's GEMMs off": arm(5.0, 5.0, 4.0),
        "float8, Triton's GEMMs on": arm(7.0, 7.0, 7.0),
    }
    assert float8_time.compared(found) == {"times_bfloat16": pytest.approx(1.2)}
    assert float8_time.cosine({"a": jnp.array([3.0, 0.0])}, {"a": jnp.array([3.0, 4.0])}) == pytest.approx(
        0.6
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast.*'float8'")
def test_a_small_block_is_in_fp8_only_if_a_rule_asks():
    found, alone = (float8_time.measure(32, 32, 1, 2, rules) for rules in (float8_time.ALL_PRODUCTS, None))
    assert list(found["arms"]) == [
        f"{dtype}, Triton's GEMMs {state}" for dtype in ("bfloat16", "float8") for state in ("off", "on")
    ]
    for figures in found["arms"].values():
        assert len(figures["ms_blocks"]) == 2
        assert sum(figures["products"].values()) == 18
    assert 0.97 < found["gradient_cosine"] < 0.9995
    assert alone["gradient_cosine"] > 0.9999


@pytest.mark.slow
def test_each_kind_of_mask_is_compared_with_float32_and_timed():
    found = attention_time.measure((2, 32, 2, 8), jnp.dtype("bfloat16"), 1, 2)
    assert list(found) == list(attention_time.KINDS)
    for figures in found.values():
        assert figures["fault"] == ""
        assert 0 < figures["errors"]["fused"] < 0.05
        assert all(ms > 0 for ms in figures["ms"].values())


def test_a_fault_of_attention_is_a_large_error_or_one_that_is_not_fused():
    errors = {"autocast": 0.01, "fused": 0.02}
    assert attention_time.fault("", errors, 1e-3) == ""
    assert attention_time.fault("JAX says no", errors, 1e-3) == "not fused: JAX says no"
    assert "an error of 5.0e-02" in attention_time.fault("", errors | {"fused": 0.05}, 1e-3)
