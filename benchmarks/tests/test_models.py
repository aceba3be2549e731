"""The models of examples/models train on real data, in half precision as in float32."""

import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import examples.models
from examples.models import FAMILIES, data, gpt2, ssd, training, unet, waveglow, workload
from examples.models.attention import attention
from tests.support.jaxprs import equations

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS = {"bert-base": 60, "unet": 60, "gpt2-small": 25}


@pytest.fixture(scope="module")
def script():
    """examples/train.py. As a script it imports `models` of the examples, not the one of the tests."""
    spec = importlib.util.spec_from_file_location("examples_train", EXAMPLES / "train.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, found in {"": examples.models, ".training": training, ".workload": workload}.items():
            patch.setitem(sys.modules, f"models{name}", found)
        spec.loader.exec_module(module)
    return module


def assert_learns_alike(full, half):
    """The losses of both runs fall, by the same amount."""
    steps = len(full)
    assert np.isfinite(full).all()
    few = steps // 5
    fell = float(full[:few].mean() - full[-few:].mean())
    assert fell > 0.15 * abs(full[:few].mean())
    # The same path, but for rounding; a step may be skipped while the scale settles.
    assert half[0] == pytest.approx(full[0], rel=2**-8, abs=2**-8)
    assert half[-few:].mean() == pytest.approx(full[-few:].mean(), abs=0.1 * fell)
    assert not np.array_equal(full, half)


# The test of the table trains NeuMF.
@pytest.mark.cases(fast=1, slow=0)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gpt2-medium", "neumf")])
def test_a_small_model_learns_real_data_in_float16_as_in_float32(script, family):
    workload, steps = FAMILIES[family].small(), STEPS.get(family, 20)
    assert_learns_alike(*(script.train(workload, arm, steps).losses for arm in ("float32", "float16")))


def test_train_prints_its_table(script, capsys):
    runs = script.main(["neumf", "--steps", "40"])
    assert_learns_alike(runs["float32"].losses, runs["float16"].losses)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == list(runs) == ["float32", "bfloat16", "float16"]
    assert all(float(line.split()[1]) > float(line.split()[2]) for line in lines[1:4])


# What is published.


@functools.cache
def full_variables(family):
    workload = FAMILIES[family].full()
    return jax.eval_shape(lambda: workload.init(0))


def parameters(family):
    return sum(x.size for x in jax.tree.leaves(full_variables(family)["params"]))


@pytest.mark.parametrize(
    ("family", "millions"),
    [
        ("resnet50", 25.557),  # torchvision's
        ("gpt2-small", 124.476),  # 124.440 with 50,257 tokens
        ("gpt2-medium", 354.871),
        ("bert-base", 109.1),  # 109.5 with segments and a pooler
        ("unet", 31.03),
        ("neumf", 31.8),
        ("ssd", 20.0),
    ],
)
def test_the_full_size_has_the_published_number_of_parameters(family, millions):
    assert parameters(family) / 1e6 == pytest.approx(millions, rel=0.01)


def test_full_batches_have_the_shapes_that_the_models_take():
    for name, family in FAMILIES.items():
        workload = family.full()
        inputs, targets = workload.batch(0, 2)
        outputs, _ = jax.eval_shape(
            lambda variables, inputs, model=workload.model: model.apply(
                variables, *inputs, mutable=["batch_stats"]
            ),
            full_variables(name),
            inputs,
        )
        loss = jax.eval_shape(workload.loss, outputs, targets)
        assert (loss.shape, loss.dtype) == ((), jnp.float32), name


def test_no_model_has_a_cast_of_its_own():
    """Under float32 nothing is converted but integers and booleans."""
    for name, family in FAMILIES.items():
        workload = family.small()
        inputs, targets = workload.batch(0, 2)
        closed = jax.make_jaxpr(
            lambda variables, workload=workload, inputs=inputs, targets=targets: workload.loss(
                workload.model.apply(variables, *inputs, mutable=["batch_stats"])[0], targets
            )
        )(jax.eval_shape(lambda workload=workload: workload.init(0)))
        assert "f16" not in str(closed), name
        assert "f64" not in str(closed), name


def test_batches_depend_on_the_seed_alone():
    for family in FAMILIES.values():
        workload = family.small()
        again = jax.tree.leaves(workload.batch(3))
        for first, second in zip(jax.tree.leaves(workload.batch(3)), again):
            np.testing.assert_array_equal(first, second)
        other = jax.tree.leaves(workload.batch(4))
        assert any(not np.array_equal(first, second) for first, second in zip(again, other))


# The parts that a model is made of.


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_that_of_jax(is_causal):
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 7, 2, 8))
    ours = attention(query, key, value, is_causal=is_causal)
    theirs = jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_attention_in_half_has_half_products_and_a_softmax_in_float32():
    query = jnp.ones((1, 5, 2, 8), jnp.float16)
    closed = jax.make_jaxpr(attention)(query, query, query)
    inputs = {each.primitive.name: str(each.invars[0].aval.dtype) for each in equations(closed)}
    assert (inputs["dot_general"], inputs["exp"], inputs["div"]) == ("float16", "float32", "float32")
    assert closed.out_avals[0].dtype == jnp.float16


def test_gpt2_sees_nothing_that_is_to_come():
    workload = gpt2.small()
    variables = workload.init(0)
    (tokens,), _ = workload.batch(0, 1)
    changed = tokens.copy()
    changed[0, 20] += 1
    before, after = (workload.model.apply(variables, each) for each in (tokens, changed))
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert not np.allclose(before[:, 20:], after[:, 20:])


def test_unet_is_the_papers_in_size():
    images = jax.ShapeDtypeStruct((1, 572, 572, 1), jnp.float32)
    logits, _ = jax.eval_shape(lambda x: unet.UNet().init_with_output(jax.random.key(0), x), images)
    assert logits.shape == (1, 388, 388, 2)


def test_ssd_has_8732_boxes_and_decodes_encoded_boxes():
    model = ssd.SSD()
    assert model.grids() == [38, 19, 10, 5, 3, 1]
    boxes = ssd.default_boxes(model)
    assert boxes.shape == (8732, 4)
    objects = np.array([[0.5, 0.5, 0.3, 0.3], [0.1, 0.1, 0.02, 0.02]], np.float32)
    offsets, classes = ssd.match(boxes, objects, np.array([7, 9], np.int32))
    assert set(classes) == {0, 7, 9}
    assert (classes == 9).sum() == 1  # Too small for any to cover it by half; the best one has it.
    found = classes == 7
    middle = boxes[found, :2] + 0.1 * offsets[found, :2] * boxes[found, 2:]
    size = boxes[found, 2:] * np.exp(0.2 * offsets[found, 2:])
    np.testing.assert_allclose(np.hstack([middle, size]), np.tile(objects[0], (found.sum(), 1)), rtol=1e-5)


def test_ssd_loss_takes_three_hard_others_for_each_object():
    classes = jnp.zeros((1, 20), jnp.int32).at[0, 4].set(1)
    offsets = jnp.zeros((1, 20, 4))
    logits = jnp.zeros((1, 20, 2)).at[0, :, 1].set(jnp.arange(20.0))  # Ever harder to call background.
    value = ssd.loss((offsets, logits), (offsets, classes))
    entropies = np.log(1 + np.exp(np.arange(20.0)))
    assert value == pytest.approx(entropies[17:].sum() + (entropies[4] - 4), rel=1e-5)


def test_waveglow_is_invertible_and_knows_its_volume():
    """The log-determinant that the loss is made of is that of the Jacobian."""
    model = waveglow.WaveGlow(flows=3, group=4, early=2, features=4, layers=1, hop=4)
    audio, spectrum = jax.random.normal(jax.random.key(0), (1, 8)), jnp.ones((1, 2, 3))
    variables = jax.jit(model.init)(jax.random.key(1), audio, spectrum)
    variables = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape), variables)
    run = lambda audio: model.apply(variables, audio, spectrum)
    jacobian = jax.jit(jax.jacobian(lambda audio: run(audio)[0].ravel()))(audio).reshape(8, 8)
    _, log_scales, log_determinants = jax.jit(run)(audio)
    grown = sum(x.sum() for x in log_scales) + 2 * sum(log_determinants)
    assert grown == pytest.approx(float(jnp.linalg.slogdet(jacobian)[1]), abs=1e-4)


# The data.


def test_the_data_is_what_it_says():
    images, labels = data.digits()
    assert images.shape == (1797, 8, 8)
    assert 0 == images.min() < images.max() == 1
    assert set(labels) == set(range(10))
    picture, coins = data.coins()
    assert picture.shape == coins.shape == (303, 384)
    assert 0.2 < coins.mean() < 0.5
    assert picture[coins == 1].mean() > picture[coins == 0].mean() + 0.2
    assert b"import " in data.source_text().tobytes()
    assert len(data.docstrings()) > 1000
    counts = data.name_counts()
    assert counts.shape[1] == 1000
    assert (np.diff(counts.sum(0)) <= 0).all()  # The most used first.
