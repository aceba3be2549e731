"""`cause_of`: what `find_nonfinite` names, checked against `value_and_grad`; and what such tests share."""

import jax.numpy as jnp
import numpy as np

import jmp_lite as jmp
from jmp_lite.diagnostics import find_nonfinite

x = jnp.linspace(-1, 1, 12).reshape(3, 4)
w = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)


def cause_of(fun, *args, scale=None, **settings):
    """The cause that the report names."""
    return checked_report(fun, *args, scale=scale, **settings).cause


def advice_of(fun, *args, scale=None, **settings):
    """What the report says of the cause in one line: what was tried, and hints."""
    return " ".join(" ".join(checked_report(fun, *args, scale=scale, **settings).advice()).split())


def checked_report(fun, *args, scale=None, **settings):
    """The report, having checked with `value_and_grad` that the loss or a gradient is not finite."""
    report = find_nonfinite(fun, loss_scale=scale, **settings)(*args)
    used = jmp.NoOpLossScale() if scale is None else jmp.StaticLossScale(scale)
    value, grads = jmp.value_and_grad(fun, used, **settings)(*args)
    loss = value[0] if settings.get("has_aux") else value
    assert report.is_finite == bool(jmp.all_finite((loss, grads)))
    np.testing.assert_allclose(report.loss, loss, rtol=1e-3)
    return report


def half(fun):
    return lambda w, x: fun(w.astype(jnp.float16), x.astype(jnp.float16)).astype(jnp.float32)
