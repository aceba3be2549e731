"""benchmarks/arms/torch_models held to examples/models: the same loss, gradients and steps."""

import copy
import dataclasses
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip('needs pip install -e ".[torch]"', allow_module_level=True)

import torch

from benchmarks.arms.torch_models import make_optimizer, tensors, twin
from benchmarks.arms.torch_models.load import converted, load
from examples.models import FAMILIES, resnet
from examples.models.workload import Optimizer

EPSILON = float(np.finfo(np.float32).eps)
RTOL = 1e3 * EPSILON
pytestmark = pytest.mark.usefixtures("one_thread")

WORKLOADS = {name: family.small for name, family in FAMILIES.items() if name != "gpt2-medium"}
WORKLOADS["resnet of bottlenecks"] = lambda: dataclasses.replace(
    resnet.small(), model=resnet.ResNet(classes=10, stages=(1, 2), features=8, stem=7)
)


def random_variables(workload):
    """Nothing is zero or one, where a model starts from, so that nothing is hidden by it."""
    rng = np.random.default_rng(1)
    inputs, _ = workload.batch(0, 1)

    def random(path, shape):
        noise = rng.standard_normal(shape.shape).astype(np.float32)
        match path[-1].key:
            case "kernel":
                return noise / math.sqrt(math.prod(shape.shape[:-1]))
            case "scale" | "var":
                return np.exp(noise / 4)
        return noise / 4

    shapes = jax.eval_shape(workload.model.init, jax.random.key(0), *inputs)
    return jax.tree_util.tree_map_with_path(random, shapes)


@functools.cache
def flax_side(name):
    """A workload, its variables and batch, and of these the loss, the gradients and the new statistics."""
    workload = WORKLOADS[name]()
    variables, (inputs, targets) = random_variables(workload), workload.batch(0, 6)
    statistics = {key: value for key, value in variables.items() if key != "params"}

    def loss(params):
        outputs, new = workload.model.apply(
            {"params": params, **statistics}, *inputs, mutable=list(statistics)
        )
        return workload.loss(outputs, targets), new

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, new_statistics), grads = run(variables["params"])
    return workload, variables, (inputs, targets), float(value), grads, new_statistics


def close(found, expected, atol=0.0):
    """Whether two tensors agree, relative to the norm of all that is expected."""
    return float((found - expected).norm()) <= RTOL * float(expected.norm()) + atol


def doubled(inputs):
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_twin_has_the_loss_the_gradients_and_the_statistics_of_its_model(name):
    workload, variables, batch, value, grads, statistics = flax_side(name)
    module, loss = twin(workload, variables)
    inputs, targets = tensors(batch, "cpu")
    with torch.no_grad():
        found = loss(copy.deepcopy(module)(*inputs), targets)
    assert (found.dtype, found.shape) == (torch.float32, ())
    assert found.item() == pytest.approx(value, rel=RTOL)
    # In float64: a float32 convolution on a CPU is off by enough to turn a ReLU near its corner on or off.
    loss(module.double()(*doubled(inputs)), targets).backward()
    expected = converted(module, {"params": grads, **statistics})
    total = math.sqrt(sum(float(x.square().sum()) for x in expected.values()))
    for name, x in module.named_parameters():
        if x.requires_grad:  # A gradient may be zero but for the rounding: of the bias of attention's keys.
            assert close(x.grad, expected.pop(name), atol=EPSILON * total), name
    for name, statistic in expected.items():
        # PyTorch's running variance takes the batch as a sample of a population: n / (n - 1).
        rel = RTOL if name.endswith("mean") else 1 / 5
        np.testing.assert_allclose(module.get_buffer(name), statistic, rtol=rel, atol=RTOL)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_two_steps_of_an_optimizer_are_those_of_optax(kind):
    workload = FAMILIES["gpt2-small"].small()
    variables = random_variables(workload)
    grads = jax.tree.map(lambda x: np.cos(9 * x), variables["params"])
    settings = Optimizer(kind, 0.01)

    @jax.jit
    def two_steps(params):
        tx = settings()
        state = tx.init(params)
        for factor in (1, -2):
            updates, state = tx.update(optax.tree.scale(factor, grads), state, params)
            params = optax.apply_updates(params, updates)
        return params

    module, _ = twin(workload, variables)
    start = {name: x.detach().clone() for name, x in module.named_parameters()}
    optimizer = make_optimizer(settings, module)
    scaled = converted(module, {"params": grads})
    for factor in (1, -2):
        for name, x in module.named_parameters():
            x.grad = factor * scaled[name]
        optimizer.step()
    expected = converted(module, {"params": two_steps(variables["params"])})
    for name, x in module.named_parameters():
        assert close(x.detach() - start[name], expected[name] - start[name])


def test_each_workload_has_an_optimizer_for_both():
    for family in FAMILIES.values():
        for workload in (family.full(), family.small()):
            assert isinstance(workload.optimizer(), optax.GradientTransformation)
            optimizer = make_optimizer(workload.optimizer, torch.nn.Linear(1, 1))
            assert type(optimizer).__name__.lower() == workload.optimizer.kind
            assert optimizer.defaults["lr"] == workload.optimizer.learning_rate


# The loader.


@pytest.fixture(scope="module")
def gpt2():
    workload = FAMILIES["gpt2-small"].small()
    variables = random_variables(workload)
    return twin(workload, variables)[0], variables


def changed(variables, change):
    variables = copy.deepcopy(variables)
    change(variables["params"])
    return variables


def test_a_missing_parameter_is_named(gpt2):
    module, variables = gpt2
    without = changed(variables, lambda params: params["blocks_1"]["norm"].pop("scale"))
    with pytest.raises(ValueError, match=r"blocks\.1\.norm\.weight needs blocks_1_norm_scale"):
        load(module, without)


def test_a_parameter_without_a_place_is_named(gpt2):
    module, variables = gpt2
    more = changed(variables, lambda params: params["blocks_1"].update(gain=np.ones(3, np.float32)))
    with pytest.raises(ValueError, match=r"no parameter for Flax's \['blocks_1_gain'\]"):
        load(module, more)


def test_a_bias_that_the_module_does_not_have_is_no_place():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False))
    kernel, bias = np.ones((2, 3), np.float32), np.ones(3, np.float32)
    load(module, {"params": {"0": {"kernel": kernel}}})
    with pytest.raises(ValueError, match=r"no parameter for Flax's \['0_bias'\]"):
        load(module, {"params": {"0": {"kernel": kernel, "bias": bias}}})


def test_a_parameter_of_another_shape_is_named(gpt2):
    module, variables = gpt2
    bent = changed(variables, lambda params: params["blocks_0"]["expand"].update(kernel=jnp.ones((256, 64))))
    with pytest.raises(ValueError, match=r"blocks\.0\.expand\.weight has shape \(256, 64\).*\(64, 256\)"):
        load(module, bent)


def test_a_layer_that_the_loader_does_not_know_is_named():
    module = torch.nn.Sequential(torch.nn.PReLU())
    with pytest.raises(ValueError, match=r"no array for the module's \['0\.weight'\]"):
        load(module, {"params": {}})


def test_a_module_keeps_its_own_copy(gpt2):
    module, variables = gpt2
    kernel = np.array(variables["params"]["blocks_0"]["merge"]["kernel"])
    load(module, variables)
    with torch.no_grad():
        module.blocks[0].merge.weight.zero_()
    np.testing.assert_array_equal(variables["params"]["blocks_0"]["merge"]["kernel"], kernel)
    load(module, variables)
    np.testing.assert_array_equal(module.blocks[0].merge.weight.detach(), kernel.T)
