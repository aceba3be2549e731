"""Which transforms may be around `with_loss_scale` or in front of it: the table of the guide, row by row."""

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from optax import contrib

import jmp_lite as jmp

PAGE = pathlib.Path(__file__).parents[3] / "docs/loss-scaling.md"
PARAMS = {"w": jnp.linspace(-1, 1, 3), "b": jnp.ones(2)}
GRADS, NAN, INF = (
    jax.tree.map(lambda p, number=number: jnp.full_like(p, number), PARAMS)
    for number in (0.5, jnp.nan, jnp.inf)
)
ROWS = [
    (code, outside, inside)
    for codes, outside, inside in re.findall(r"^\| (`optax.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.M)
    for code in re.findall(r"`(.*?)`", codes)
]
NAMES = {"optax": optax, "contrib": contrib, "adversary": optax.sgd(0.05), "mask": {"w": True, "b": True}}


def wrapped(code, tx):
    made = eval(code, {**NAMES, "tx": tx})
    return made.gradient_transformation() if isinstance(made, optax.MultiSteps) else made


def steps(tx, code):
    """Two finite steps, one that overflows, two more: whether the third moved, whether a later one did."""
    params = optax.LookaheadParams.init_synced(PARAMS) if "lookahead" in code else PARAMS
    state, moved = tx.init(params), []
    for grads in (GRADS, GRADS, INF if "clip" in code else NAN, GRADS, GRADS):
        extra = {"grad_fn": lambda params, i, grads=grads: grads} if "opaque_mode" in code else {}
        updates, state = tx.update(grads, state, params, **extra)
        new = optax.apply_updates(params, updates)
        moved.append(any((a != b).any() for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(params))))
        params = new
    is_finite = all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    return moved[2] or not is_finite, any(moved[3:]), state


@pytest.mark.cases(fast=12, slow=len(ROWS))
@pytest.mark.parametrize(("code", "outside", "inside"), ROWS[::-1], ids=[code for code, *_ in ROWS[::-1]])
def test_each_row_of_the_table(code, outside, inside):
    sgd = optax.sgd(0.125)
    moved, learns, state = steps(jmp.with_loss_scale(wrapped(code, sgd)), code)
    assert inside.startswith("yes")
    assert not moved
    assert learns
    assert (jmp.get_loss_scale(state).loss_scale, state.counts.tolist()) == (2.0**14, [5, 1, 0])
    moved, learns, state = steps(wrapped(code, jmp.with_loss_scale(sgd)), code)
    if outside.startswith("error"):
        for read in (jmp.get_loss_scale, jmp.get_metrics, jmp.grads_finite, jmp.raise_if_stuck):
            with pytest.raises(ValueError, match=r"with_loss_scale outside: jmp\.with_loss_scale\("):
                read(state)
        return
    metrics = jmp.get_metrics(state)
    sees_it = metrics["loss_scale"] == 2.0**14 and metrics["skipped_steps"] == 1
    assert learns
    assert sees_it == ("never sees" not in outside)
    assert outside.startswith("yes" if sees_it and not moved else "no: ")


def test_the_table_has_rows_of_each_kind():
    kinds = {outside.split(":")[0].split(",")[0] for _, outside, _ in ROWS}
    assert (len(ROWS), kinds) == (18, {"yes", "no", "error"})


@pytest.mark.parametrize("wrap", [jmp.with_loss_scale, jmp.skip_nonfinite])
def test_the_message_names_both_and_the_order_to_write(wrap):
    name = wrap.__name__
    for made, said in (
        (optax.apply_if_finite(wrap(optax.sgd(1.0)), 5), "optax.apply_if_finite(tx, ...)"),
        (optax.MultiSteps(wrap(optax.sgd(1.0)), 2), "optax.MultiSteps(tx, ...)"),
        (optax.chain(optax.ema(0.9), wrap(optax.sgd(1.0))), "optax.chain(optax.ema(...), tx)"),
    ):
        said = (
            f"outside of {name} hides an overflow.* Put {name} outside: {re.escape(f'jmp.{name}({said})')}\\."
        )
        with pytest.raises(ValueError, match=said):
            jmp.get_metrics(made.init(PARAMS))


def test_a_train_step_names_it_when_it_is_traced():
    tx = optax.masked(optax.apply_if_finite(jmp.with_loss_scale(optax.sgd(1.0)), 5), True)
    for state in (tx.init(PARAMS), nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)):
        with pytest.raises(ValueError, match=r"jmp\.with_loss_scale\(optax\.apply_if_finite\("):
            jax.eval_shape(lambda state=state: jmp.get_loss_scale(state).loss_scale)


def test_a_momentum_that_is_not_in_front_is_not_named():
    momentum, tx = optax.trace(0.9).init(PARAMS), jmp.with_loss_scale(optax.sgd(0.1, momentum=0.9))
    for state in (
        optax.chain(jmp.with_loss_scale(optax.sgd(1.0)), optax.trace(0.9)).init(PARAMS),
        {"a": momentum, "b": tx.init(PARAMS)},
        (optax.chain(optax.trace(0.9)).init(PARAMS), tx.init(PARAMS)),
        optax.multi_transform(
            {"a": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), "b": tx},
            {"w": "a", "b": "b"},
        ).init(PARAMS),
    ):
        assert jmp.get_metrics(state)["grads_finite"]
