"""The files of results: the step of a model costs no more by autocast than by a policy."""

import json
import statistics

import pytest

from benchmarks.compiled import predict
from benchmarks.compiled.pages import RESULTS
from examples.models import FAMILIES

MEASURES = ("bytes_moved", "program_bytes", "kernels")
LIMIT = 1.012


def arms(family):
    found = json.loads((RESULTS / predict.PRETENDED / f"{family}.json").read_text())["arms"]
    return found["float16"], found["float16 autocast"]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_costs_at_most_what_a_policy_costs(family, measure):
    policy, ours = arms(family)
    assert ours[measure] <= LIMIT * policy[measure]
    assert ours["products"] == policy["products"]


def test_the_lstm_moves_less_than_60_gb_by_less_than_8500_kernels():
    _, ours = arms("seq2seq")
    assert ours["bytes_moved"] < 60e9
    assert ours["kernels"] < 8500


def test_predict_keeps_the_arms_that_it_does_not_compile(monkeypatch, tmp_path):
    facts = {"products": {}, "kernels": 1, "bytes_moved": 1, "program_bytes": 1, "compile_seconds": 1}
    monkeypatch.setattr(predict, "predict", lambda family, arm, pretend, size: {**facts, "arm": arm})
    path = tmp_path / predict.PRETENDED / "neumf.json"

    def compile_again(arm):
        monkeypatch.setattr("sys.argv", ["predict", "neumf", "--arms", arm, "--results", str(tmp_path)])
        predict.main()
        return list(json.loads(path.read_text())["arms"])

    assert compile_again("float32") == ["float32"]
    assert compile_again("float16") == ["float32", "float16"]
    old = json.loads(path.read_text())
    path.write_text(json.dumps({**old, "versions": {**old["versions"], "jax": "0.4.0"}}))
    assert compile_again("TF32") == ["TF32"]  # Other versions: the figures would not compare.


@pytest.mark.parametrize("family", ["gpt2", "unet", "resnet"])
def test_the_mean_of_bfloat16_lies_between_two_float32_seeds(family):
    """A sentence of docs/choosing.md."""
    runs = json.loads((RESULTS / "cpu" / "convergence.json").read_text())["families"][family]["arms"]
    full, half = ([run["held_out_loss"] for run in runs[arm]] for arm in ("float32", "bfloat16"))
    assert min(full) < statistics.mean(half) < max(full)


def test_tf32_moves_and_holds_as_many_bytes_as_float32():
    """A sentence of docs/choosing.md."""
    found = json.loads((RESULTS / predict.PRETENDED / "gpt2-small.json").read_text())["arms"]
    for measure in ("bytes_moved", "program_bytes"):
        assert found["TF32"][measure] == found["float32"][measure] > 1.5 * found["float16"][measure]
