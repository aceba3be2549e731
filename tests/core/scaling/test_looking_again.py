"""Optimizers that evaluate the loss again, or read it: what they return is checked before it is applied."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax import contrib

import jmp_lite as jmp
from tests.support.steps import bits, make_params

PARAMS = {"w": jnp.linspace(-0.5, 0.5, 8).reshape(4, 2), "b": jnp.linspace(0.01, 0.02, 2)}
X = jnp.linspace(-1, 1, 12).reshape(3, 4)
Y = jnp.linspace(0, 1, 6).reshape(3, 2)


@jmp.autocast(dtype="float16")
def loss_fn(params):
    return jnp.mean((jnp.tanh(X @ params["w"] + params["b"]) @ params["w"].T - X) ** 2) + jnp.mean(
        (X @ params["w"] - Y) ** 2
    )


def uphill(learning_rate):
    """A user's own optimizer: the gradient further up."""

    def update(grads, state, params, *, grad_fn, **extra_args):
        del extra_args
        ahead = jax.tree.map(lambda p, g: p + g, params, grads)
        updates = jax.tree.map(lambda g: -learning_rate * g, grad_fn(ahead))
        mean = jax.tree.map(lambda m, u: 0.9 * m + 0.1 * u, state, updates)
        return updates, mean

    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformationExtraArgs(zeros, update)


ADVERSARY = optax.chain(contrib.normalize(), optax.sgd(0.5))
HUTCHINSON = contrib.hutchinson_estimator_diag_hessian(jax.random.key(0))
AGAIN = {  # Optimizers, and the extra arguments of their update.
    "sam_opaque": (contrib.sam(optax.sgd(0.05), ADVERSARY, opaque_mode=True), "grad_fn"),
    "polyak_sgd": (optax.polyak_sgd(0.1), "value"),
    "sophia": (contrib.sophia(1e-2, hessian_diagonal_fn=HUTCHINSON, update_interval=2), "obj_fn"),
    "own": (uphill(0.05), "grad_fn"),
    "sam_transparent": (contrib.sam(optax.sgd(0.05), ADVERSARY), ""),
    "momo": (contrib.momo(0.1), "value"),
    "momo_adam": (contrib.momo_adam(1e-2), "value"),
    "reduce_on_plateau": (optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau()), "value"),
    "lbfgs": (optax.lbfgs(), "value grad value_fn"),
    "backtracking": (
        optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(6, store_grad=True)),
        "value grad value_fn",
    ),
    "schedule_free": (contrib.schedule_free_adamw(1e-2), ""),
}


def again_step(tx, takes):
    """A jitted step; `spoilt` is added to what the optimizer reads and evaluates."""

    def step(params, opt_state, spoilt):
        scale = jmp.get_loss_scale(opt_state)
        again = lambda params: loss_fn(params) * (1 + spoilt)
        grad_fn = lambda params, *_: jmp.grad(again, scale)(params)
        value, grads = jmp.value_and_grad(loss_fn, scale)(params)
        value += spoilt
        # The Hessian and the line search overflow in float16 as the gradients do.
        scaled = lambda params: scale.unscale(scale.scale(again(params)).astype(jnp.float16))
        known = {"grad_fn": grad_fn, "obj_fn": scaled, "value": value, "grad": grads, "value_fn": scaled}
        extra_args = {name: known[name] for name in takes.split()}
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
        finite = jmp.all_finite(grads)
        return optax.apply_updates(params, updates), opt_state, finite

    return jax.jit(step)


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("name", AGAIN)
def test_a_skipped_step_changes_nothing_and_no_parameter_becomes_nan(name):
    inner, takes = AGAIN[name]
    tx = jmp.with_loss_scale(inner, jmp.DynamicLossScale(2.0**10, period=2))
    params, step = PARAMS, again_step(tx, takes)
    opt_state, looked_again = tx.init(params), 0
    for index in range(40):
        spoilt = {5: np.nan, 11: np.inf, 23: -np.inf}.get(index, 0.0)
        new_params, new_state, finite = step(params, opt_state, jnp.float32(spoilt))
        if jmp.grads_finite(new_state):
            assert not (spoilt and "value" in takes.split())
        else:
            assert bits(new_params) == bits(params)
            assert bits(new_state.inner_state) == bits(opt_state.inner_state)
            before, after = (jmp.get_metrics(state)["loss_scale"] for state in (opt_state, new_state))
            assert float(after) == float(before) / 2
            looked_again += bool(finite)
        params, opt_state = new_params, new_state
        assert bool(jmp.all_finite(params))
    assert looked_again or not takes  # Skipped, although the first gradients were finite.
    assert 0 < int(jmp.get_metrics(opt_state)["skipped_steps"]) < 25
    assert float(loss_fn(params)) < float(loss_fn(PARAMS))


def test_a_plain_optimizer_has_the_same_program_whatever_it_returns():
    """Only `loss_scale=`, which `unscale` divides by, or no extra argument: only gradients are checked."""
    tx = jmp.skip_nonfinite(optax.chain(jmp.unscale(), optax.sgd(1.0)))
    params = make_params()

    def count(**extra):
        return str(jax.make_jaxpr(lambda *a: tx.update(*a, **extra))(params, tx.init(params), params)).count(
            "is_finite"
        )

    assert count(loss_scale=jmp.NoOpLossScale()) == 3
    assert count(loss_scale=jmp.NoOpLossScale(), value=jnp.float32(1)) > 3


def test_a_stuck_run_names_the_optimizer_whose_gradients_are_finite():
    tx = jmp.with_loss_scale(optax.polyak_sgd(0.1))
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.float32(np.nan))
    assert state.leaf_finite.all()
    with pytest.raises(FloatingPointError, match=r"gradients were finite.*extra argument.*value"):
        jmp.raise_if_stuck(state, 1)


def test_all_devices_agree_about_what_the_optimizer_returned():
    tx = jmp.with_loss_scale(uphill(0.1), axis_name="data")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jnp.arange(8.0)
    opt_state = tx.init(params)
    specs = jax.tree.map(lambda leaf: P("data") if leaf.shape == (8,) else P(), opt_state)

    def step(params, opt_state):
        grad_fn = lambda ahead: jnp.where(ahead > 13, jnp.inf, 1.0)  # On the last device alone.
        updates, opt_state = tx.update(params, opt_state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), opt_state

    arguments = (P("data"), specs)
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=arguments, out_specs=arguments))
    after, state = sharded(params, opt_state)
    assert (after.tolist(), state.counts.tolist()) == (params.tolist(), [1, 1, 1])
