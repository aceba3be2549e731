"""`autocast` on unmodified models of every kind: what runs in half, how close it comes, what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from tests.support import models
from tests.support.jaxprs import products
from tests.support.steps import bits

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

DTYPES = [jnp.dtype("float16"), jnp.dtype("bfloat16")]


@functools.cache
def case_of(name, dtype=None):
    if name.startswith("Haiku"):
        pytest.importorskip("haiku")
    return models.CASES[name](dtype)


def batches(case, count=4):
    """The batch of the case, and others like it: the rounding errors of one batch are random."""
    yield case.inputs, case.targets
    for seed in range(1, count):
        if case.inputs.dtype == jnp.int32:
            x = jax.random.randint(jax.random.key(seed), case.inputs.shape, 0, models.VOCABULARY)
        else:
            x = jax.random.normal(jax.random.key(seed), case.inputs.shape)
        yield x, x if case.targets is not None else None


def relative_errors(actual, expected):
    """Of each floating array, relative to it or to a tenth of the largest."""
    pairs = [
        (a, b)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
        if jnp.issubdtype(b.dtype, jnp.floating)
    ]
    floor = 0.1 * max((float(jnp.linalg.norm(b)) for _, b in pairs), default=1.0)
    return [float(jnp.linalg.norm(a - b)) / max(float(jnp.linalg.norm(b)), floor) for a, b in pairs]


def root_mean_square(errors):
    return float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0


# Every family, in one dtype or the other: compiling takes the time here.
CLOSENESS = {
    "Linen MLP": "float16",
    "Linen ResNet": "bfloat16",
    "NNX ResNet": "float16",
    "Linen transformer, tied": "bfloat16",
    "NNX transformer": "float16",
    "JAX transformer, scanned and rematerialized": "float16",
    "Linen LSTM": "float16",
    "NNX experts": "float16",
    "Equinox transformer": "float16",
    "Haiku network": "bfloat16",
}


def compiled_steps(name, dtype):
    case = case_of(name)
    steps = {
        "float32": case.step(),
        "autocast": case.step(inner=functools.partial(jmp.autocast, dtype=dtype)),
        "by hand": case_of(name, jnp.dtype(dtype)).by_hand(dtype),
    }
    return {key: jax.jit(step) for key, step in steps.items()}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("name", "dtype"), CLOSENESS.items())
def test_loss_gradients_and_statistics_are_as_close_to_float32_as_casts_by_hand_bring_them(name, dtype):
    case, eps = case_of(name), float(jnp.finfo(dtype).eps)
    steps = compiled_steps(name, dtype)
    errors = {key: [] for key in steps}
    for x, targets in batches(case):
        results = {key: step(case.params, case.state, x, targets) for key, step in steps.items()}
        for key, result in results.items():
            errors[key].append([relative_errors(*pair) for pair in zip(result, results["float32"])])
    for index in range(3):  # Loss, gradients, state.
        of = {
            key: root_mean_square([e for batch in runs for e in batch[index]]) for key, runs in errors.items()
        }
        # The loss is one number a batch: its error by hand may be small by luck.
        slack = 4 if index == 0 else 0.25
        assert of["autocast"] <= 1.5 * of["by hand"] + slack * eps
        assert of["autocast"] <= (4, 64, 2)[index] * eps
    assert root_mean_square([e for batch in errors["autocast"] for e in batch[1]]) > 0.1 * eps  # In half.
    if name in ("Linen ResNet", "NNX ResNet", "Haiku network"):
        check_batch_statistics(case, steps, dtype)


def check_batch_statistics(case, steps, dtype):
    """Batch statistics are updated in float32, of half activations."""
    (*_, expected), (*_, actual) = steps["float32"](*case.arguments), steps["autocast"](*case.arguments)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for before, a, b in zip(*map(jax.tree.leaves, (case.state, actual, expected)), strict=True):
        assert a.dtype == b.dtype
        if b.dtype != jnp.float32 or b.ndim == 0:  # Random state, and Haiku's counters.
            assert bits(a) == bits(b)
            continue
        np.testing.assert_allclose(a, b, rtol=0, atol=4 * float(jnp.finfo(dtype).eps))
        assert not np.array_equal(a, before)
        assert not np.array_equal(a, b)
        assert not np.array_equal(a, a.astype(dtype).astype(jnp.float32))  # Neither stored nor made in half.


def test_a_bilinear_resize_keeps_the_precision_for_which_jax_asks():
    resize = lambda x: jax.image.resize(x, (4, 16, 16, 3), "bilinear")
    assert set(products(jmp.autocast(resize), models.IMAGES)) == {("float32", "float32")}
    default = lambda x: jax.image.resize(x, (4, 16, 16, 3), "bilinear", precision="default")
    assert set(products(jmp.autocast(default), models.IMAGES)) == {("bfloat16", "bfloat16")}


# The transformer, next to casts by hand.

LAYERS = 3


def transformer_losses(framework, dtype):
    """A transformer's parameters, and its loss of them: plain, under autocast, with casts by hand."""
    if framework == "Linen":
        case = models.linen_case(models.LinenTransformer(layers=LAYERS), *models.NEXT_TOKEN)
    else:
        case = models.nnx_case(functools.partial(models.NnxTransformer, layers=LAYERS), *models.NEXT_TOKEN)
    policy = jmp.get_policy(f"params=float32,compute={dtype},output=float32")

    def plain(params):
        if framework == "NNX":
            y = case.rebuild(params, case.state)(case.inputs)
        else:
            y, _ = case.forward(params, case.state, case.inputs)
        return case.criterion(y, case.targets)

    def by_hand(params):
        y, _ = case.cast_forward(policy, params, case.state, case.inputs)
        return case.criterion(policy.cast_to_output(y), case.targets)

    return case.params, plain, jmp.autocast(plain, dtype), by_hand


def saved_arrays(loss, params):
    """What is kept from the forward to the backward pass."""
    return jax.tree.leaves(jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params))


def nbytes(arrays):
    return sum(array.size * array.dtype.itemsize for array in arrays)


each_framework = pytest.mark.parametrize(("framework", "dtype"), list(zip(["Linen", "NNX"], DTYPES)))


@pytest.mark.cases(slow=1)
@each_framework
def test_a_transformer_runs_the_products_of_casts_by_hand_and_in_the_backward_pass_more_of_them_in_half(
    framework, dtype
):
    params, plain, automatic, by_hand = transformer_losses(framework, dtype)
    expected, found, found_by_hand = (
        products(jax.value_and_grad(loss), params) for loss in (plain, automatic, by_hand)
    )
    assert len(found) == len(found_by_hand) == len(expected) > 12 * LAYERS
    assert set(found) == {(dtype.name, dtype.name)}
    # The product of queries and keys in jax.nn.dot_product_attention gives float32, and so its cotangents
    # are float32: two products a layer for which casts by hand can do nothing.
    mixed = [pair for pair in found_by_hand if pair != (dtype.name, dtype.name)]
    assert mixed == [("float32", dtype.name)] * 2 * LAYERS


@pytest.mark.cases(slow=1)
@each_framework
def test_a_transformer_saves_at_most_the_bytes_of_casts_by_hand_for_the_backward_pass(framework, dtype):
    params, plain, automatic, by_hand = transformer_losses(framework, dtype)
    full, half, half_by_hand = (nbytes(saved_arrays(loss, params)) for loss in (plain, automatic, by_hand))
    assert half <= 1.01 * half_by_hand
    assert half < 0.65 * full
