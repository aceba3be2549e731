"""examples/export.py: a model and a train step in half, exported, and run by a process that has only JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from jmp_lite.programs import compile_for, read_program
from tests.support.scripts import load_script

pytestmark = pytest.mark.slow
script = load_script("export")
HALF_EPS = float(jnp.finfo(jnp.float16).eps)


@pytest.fixture(scope="module")
def variables():
    return script.train(0)


@pytest.mark.exhaustive
def test_the_example_prints_size_and_accuracy_of_what_a_fresh_process_says(monkeypatch, capsys, tmp_path):
    variables = script.train(30)
    monkeypatch.setattr(script, "train", lambda steps: variables)
    results = script.main(["--output", str(tmp_path / "new folder")])
    full, half = results["float32"], results["float16"]
    assert (set(full.products), set(half.products)) == ({"f32"}, {"f16"})
    assert full.products["f32"] == half.products["f16"] >= 10
    # Half of the parameters, and a graph that is the same for both.
    count = sum(x.size for x in jax.tree.leaves(variables["params"]))
    assert full.size - half.size == pytest.approx(2 * count, rel=0.1)
    assert 0.2 < full.accuracy < 1  # Of ten classes, after 30 steps.
    assert half.accuracy == pytest.approx(full.accuracy, abs=0.01)
    largest = np.abs(full.logits).max()
    np.testing.assert_allclose(half.logits, full.logits, atol=10 * HALF_EPS * largest)
    assert not np.array_equal(half.logits, full.logits)
    out = capsys.readouterr().out
    for name, found in results.items():
        row = next(line.split() for line in out.splitlines() if line.startswith(name))
        assert row[1] == f"{found.size:,}"
        assert row[4] == f"{found.accuracy:.1%}"


def test_a_parameter_that_half_cannot_hold_does_not_leave(variables):
    params = jax.tree.map(lambda x: x, variables["params"])
    params["head"]["kernel"] = params["head"]["kernel"].at[3, 4].set(1e5)
    params["stem_norm"]["scale"] = params["stem_norm"]["scale"] * 1e-9
    with pytest.raises(
        ValueError, match=r"(?s)  head/kernel: 100000 is .*  stem_norm/scale: 100.0% "
    ) as error:
        script.make_predict({**variables, "params": params}, script.HALF)
    assert "with_rules({'head': 'float32', 'stem_norm': 'float32'})" in str(error.value)
    kept = script.HALF.with_rules({"head": "float32", "stem_norm": "float32"})
    exported = script.export_predict(script.make_predict({**variables, "params": params}, kept))
    assert script.product_dtypes(exported) == {"f16": 18, "f32": 2}  # Each once a platform.


def test_a_cpu_exports_for_cuda_and_the_program_for_an_h100_has_half_products(variables):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra [h100]")
    exported = script.export_predict(script.make_predict(variables, script.HALF))
    read = jax.export.deserialize(exported.serialize())
    assert "cuda" in read.platforms
    program = read_program(compile_for("h100", read.call, jax.ShapeDtypeStruct((64, 8, 8, 1), jnp.float32)))
    assert len(program.matmuls) > 0
    assert {array.dtype for product in program.matmuls for array in product.operands} == {"f16"}
    assert program.tensor_core_share == 1


# An exported train step.


def loss_fn(params, x, y):
    logits = jax.nn.relu(x @ params["w1"]) @ params["w2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def test_an_exported_train_step_holds_scale_and_optimizer_and_skips_as_here(tmp_path):
    tx = jmp.with_loss_scale(optax.adamw(1e-2), jmp.DynamicLossScale(2.0**15, period=2))

    def step(params, opt_state, batch):
        half = jmp.autocast(loss_fn, jnp.float16)
        loss, grads = jmp.value_and_grad(half, jmp.get_loss_scale(opt_state))(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w1": jax.random.normal(keys[0], (64, 32)) / 8, "w2": jax.random.normal(keys[1], (32, 10)) / 8}
    x, y = jax.random.normal(keys[2], (16, 64)), jnp.arange(16) % 10
    state = (params, tx.init(params))
    exported = script.export_step(step, state, (x, y))
    assert script.product_dtypes(exported).keys() == {"f16"}
    program = tmp_path / "step.bin"
    program.write_bytes(exported.serialize())

    leaves, tree = jax.tree.flatten(state)
    count = len(leaves)
    here = state
    for good in (False, True):
        batch = (x if good else x.at[3, 5].set(jnp.inf), y)
        *here, loss = jax.jit(step)(*here, batch)
        if good:  # The same program; a process takes its time.
            read = jax.export.deserialize(program.read_bytes())
            leaves, (there,) = read.call(list(leaves), list(batch))
        else:
            *leaves, there = script.run_elsewhere(program, *leaves, *batch)
        np.testing.assert_array_equal(there, loss)
        assert len(leaves) == count
        for ours, theirs in zip(jax.tree.leaves(tuple(here)), leaves):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    opt_state = tree.unflatten(leaves)[1]
    # Halved in the first step. Two finite steps in a row would double it.
    assert jmp.get_loss_scale(opt_state).loss_scale == 2.0**14
    assert jmp.get_metrics(opt_state)["skipped_steps"] == 1
