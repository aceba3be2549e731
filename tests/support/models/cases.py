"""A case: a model with a batch and a loss, as a function of its parameters, and cast by hand to compare."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jmp_lite as jmp
from jmp_lite.nnx import with_policy
from tests.support.arrays import integers, normal

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 2, 8, 17
ROWS = normal(1, 12, 6)
IMAGES = normal(2, 4, 8, 8, 3)
SEQUENCES = normal(3, 4, 7, 6)
TEXT = integers(4, VOCABULARY, 3, LENGTH)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model as a function of its parameters and its state.

    Attributes:
        forward: for NNX of a module and the inputs, to outputs; for the others of parameters, state and
            inputs, to outputs and the new state.
        criterion: the loss, of outputs and targets.
        params: the parameters.
        state: batch statistics and random state; for NNX everything that is no parameter.
        inputs: of the model.
        targets: of the criterion.
        rebuild: for NNX and Equinox, makes the model of `params` and `state`.
    """

    forward: Callable[..., Any]
    criterion: Callable[[Any, Any], jax.Array]
    params: Any
    state: Any
    inputs: Any
    targets: Any
    rebuild: Callable[..., Any] | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.params, self.state, self.inputs, self.targets

    def step(self, inner: Any = lambda loss: loss, outer: Any = lambda value_and_grad: value_and_grad) -> Any:
        """Returns (params, state, inputs, targets) -> (loss, gradients, new state).

        Args:
            inner: applied to the loss, in the form that the user of the framework would give to autocast.
            outer: applied to its value_and_grad.
        """

        def loss(params, state, inputs, targets):
            y, new_state = self.forward(params, state, inputs)
            return self.criterion(y, targets), new_state

        def step(params, state, inputs, targets):
            run = outer(jax.value_and_grad(inner(loss), has_aux=True))
            (value, new_state), grads = run(params, state, inputs, targets)
            return value, grads, new_state

        return step

    def by_hand(self, dtype: Any) -> Any:
        """Returns the same step with casts by hand: parameters and inputs down, outputs up."""
        policy = jmp.get_policy(f"params=float32,compute={jnp.dtype(dtype).name},output=float32")

        def loss(params, state, inputs, targets):
            y, new_state = self.cast_forward(policy, params, state, inputs)
            return self.criterion(policy.cast_to_output(y), targets), new_state

        def step(params, state, inputs, targets):
            (value, new_state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, inputs, targets)
            return value, grads, new_state

        return step

    def cast_forward(self, policy: jmp.Policy, params: Any, state: Any, inputs: Any) -> tuple[Any, Any]:
        params, inputs = policy.cast_to_compute((params, inputs))
        return self.forward(params, state, inputs)


class ModelCase(Case, abc.ABC):
    """The loss takes a model, which holds its parameters."""

    @abc.abstractmethod
    def value_and_grad(self, loss: Any) -> Any:
        """Returns the library's own `value_and_grad` of a loss of a model."""

    @abc.abstractmethod
    def results(self, model: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        """Returns the gradients as arrays, and the new state."""

    def step(self, inner: Any = lambda loss: loss, outer: Any = lambda value_and_grad: value_and_grad) -> Any:
        def loss(model, inputs, targets):
            return self.criterion(self.forward(model, inputs), targets)

        def step(params, state, inputs, targets):
            model = self.rebuild(params, state)
            value, grads = outer(self.value_and_grad(inner(loss)))(model, inputs, targets)
            return value, *self.results(model, grads, state)

        return step


class NnxCase(ModelCase):
    """NNX: the loss changes the module in place."""

    def value_and_grad(self, loss: Any) -> Any:
        return nnx.value_and_grad(loss)

    def results(self, model: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        return grads, nnx.state(model, nnx.Not(nnx.Param))

    def cast_forward(self, policy: jmp.Policy, params: Any, state: Any, inputs: Any) -> tuple[Any, Any]:
        # NNX's layers return the dtype in which their parameters were made, unless `dtype` was set.
        module = with_policy(self.rebuild(params, state), policy)
        y = self.forward(module, inputs)
        return y, nnx.state(module, nnx.Not(nnx.Param))


class EquinoxCase(ModelCase):
    """Equinox: the model holds functions beside arrays."""

    def value_and_grad(self, loss: Any) -> Any:
        return eqx.filter_value_and_grad(loss)

    def results(self, model: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        return eqx.filter(grads, eqx.is_array), state

    def cast_forward(self, policy: jmp.Policy, params: Any, state: Any, inputs: Any) -> tuple[Any, Any]:
        params, inputs = policy.cast_to_compute((params, inputs))
        return self.forward(self.rebuild(params, state), inputs), state


def weighted_mean(y: jax.Array, targets: None) -> jax.Array:
    """A loss in which every output matters, differently, and never to the other side of zero."""
    return jnp.mean((1.5 + jnp.cos(jnp.arange(y.size)).reshape(y.shape)) * (y - 1) ** 2)


def next_token_loss(logits: jax.Array, text: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, 1:]).mean()


NEXT_TOKEN = (TEXT, next_token_loss, TEXT)  # Inputs, criterion and targets of a language model.


def linen_case(model: nn.Module, inputs: Any, criterion: Any = weighted_mean, targets: Any = None) -> Case:
    init = jax.jit(model.init)
    variables = init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, inputs)
    params = variables["params"]
    state = {name: value for name, value in variables.items() if name != "params"}

    def forward(params, state, inputs):
        rngs = {"dropout": jax.random.key(5)}
        return model.apply({"params": params, **state}, inputs, rngs=rngs, mutable=list(state))

    return Case(forward, criterion, params, state, inputs, targets)


def nnx_case(
    make: Callable[[nnx.Rngs], nnx.Module], inputs: Any, criterion: Any = weighted_mean, targets: Any = None
) -> Case:
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    whole = jax.jit(lambda: nnx.state(make(nnx.Rngs(0))))()
    params, state = nnx.split_state(whole, nnx.Param, ...)
    # Copied: a step changes the module that it makes, not these.
    rebuild = lambda params, state: nnx.merge(graphdef, params, state, copy=True)
    return NnxCase(lambda module, x: module(x), criterion, params, state, inputs, targets, rebuild)


def equinox_case(model: Any, inputs: Any, criterion: Any = weighted_mean, targets: Any = None) -> Case:
    params, static = eqx.partition(model, eqx.is_array)
    rebuild = lambda params, state: eqx.combine(params, static)
    forward = lambda model, x: jax.vmap(model)(x)
    return EquinoxCase(forward, criterion, params, (), inputs, targets, rebuild)
