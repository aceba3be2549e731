"""A GPT in three precisions: what runs in fp8, what fp8 flushes to zero, and the tables of the page."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
from benchmarks.timed import float8

pytestmark = pytest.mark.filterwarnings("ignore:autocast.*'float8'")

ROOT = Path(benchmarks.__file__).parents[1]
TINY = float8.Size(width=64, layers=1, length=32, batch_size=4, steps=4)


def test_the_values_that_become_zero_are_counted_for_each_dtype():
    x = jnp.ones((16, 32)).at[:4].set(1e-7).at[4].set(0)  # A zero is not flushed: it was zero before.
    w = jnp.ones((32, 16))
    cotangent = jnp.ones((16, 16)).at[0].set(1e-11)

    def loss(x, w):
        return jnp.vdot(jax.jit(jnp.dot)(x, w), cotangent)

    grads = jax.grad(float8.ARMS["float8"](loss), (0, 1))
    assert float8.flushed(grads)(x, w) == {"float8_e4m3fn": 4 * 32 / (x.size + w.size), "float8_e5m2": 1 / 16}


def test_all_dense_products_run_in_fp8():
    size = float8.Size(layers=2)
    batch = size.batch(float8.TRAIN, 0)
    params = jax.eval_shape(size.model.init, jax.random.key(0), batch[0])["params"]
    loss = lambda params, tokens: size.model.apply({"params": params}, tokens).sum()
    counts = {
        arm: float8.products(cast(loss), params, batch[0]) for arm, cast in list(float8.ARMS.items())[1:]
    }
    # Four for each block, and the head. Attention has two more for each block.
    assert counts["float8"] == {"float8": 9, "bfloat16": 4, "float32": 0}
    assert counts["bfloat16"] == {"float8": 0, "bfloat16": 13, "float32": 0}


def test_both_parts_of_the_text_are_apart():
    size = float8.Size()
    tokens, targets = size.batch(float8.TRAIN, 3)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(tokens, size.batch(float8.TRAIN, 3)[0])
    assert float8.TRAIN[1] <= float8.HELD_OUT[0]


@pytest.mark.exhaustive
def test_the_arms_start_alike_and_the_tables_show_their_differences(tmp_path, capsys):
    path = tmp_path / "float8.json"
    found = float8.main(["--seeds", "2", "--json", str(path)], TINY)
    printed = capsys.readouterr().out
    assert json.loads(path.read_text()) == found
    first = {arm: runs[0]["losses"][0] for arm, runs in found["arms"].items()}
    assert len(set(first.values())) == 3
    assert max(first.values()) - min(first.values()) < 0.02
    assert [run["products"]["float8"] for run in found["arms"]["float8"]] == [5, 5]
    for runs in found["arms"].values():
        assert [run["skipped_steps"] for run in runs] == [0, 0]
        assert all(len(run["losses"]) == TINY.steps for run in runs)
    seed_0, seed_1 = (
        found["arms"]["float8"][seed]["held_out_loss"] - found["arms"]["bfloat16"][seed]["held_out_loss"]
        for seed in (0, 1)
    )
    assert f"| float8 - bfloat16 | {seed_0:+.4f} | {seed_1:+.4f} |" in printed
    float8.main(["--table", "--json", str(path)])
    assert capsys.readouterr().out == printed


RESULTS = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "float8.json").read_text())


def test_the_page_shows_the_results():
    assert float8.tables(RESULTS) in (ROOT / "docs" / "accuracy.md").read_text()
    assert RESULTS["parameters"] > 10_000_000


def test_in_the_results_fp8_learns_as_bfloat16_does():
    arms = RESULTS["arms"]
    losses = {arm: np.array([run["held_out_loss"] for run in runs]) for arm, runs in arms.items()}
    assert len(losses["float32"]) == 3
    differences = {other: losses[other] - losses["bfloat16"] for other in ("float8", "float32")}
    assert np.abs(differences["float8"]).max() < 0.006
    assert np.abs(differences["float32"]).max() > 0.012
    for run in arms["float8"]:
        assert run["products"] == {"float8": 25, "bfloat16": 12, "float32": 0}
        assert run["skipped_steps"] == 0
        assert max(share for moment in run["flushed"] for share in moment.values()) < 2e-3
