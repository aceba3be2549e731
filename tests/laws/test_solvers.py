"""Public solvers inside of a model: what a loop decides by stays in float32, in both orders.

A solver with adaptive steps repeats its steps in the backward pass. If it accepted others there, the gradient
would be wrong without a sign: by 66 % for the first of these programs, before autocast kept what decides.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from tests.laws.cases import ORDERS
from tests.laws.test_found import error, in_order
from tests.support.arrays import normal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(jaxopt|JAXopt|Complex dtype)"),
]

PARAMS = {
    "w": normal(0, 2, 32, scale=0.7),
    "b": normal(1, 32, scale=0.3),
    "v": normal(2, 32, 2, scale=0.18),
}
Y = normal(3, 16, 2)


def field(p, y):
    return jnp.tanh(jax.nn.softplus(y @ p["w"] + p["b"]) @ p["v"])


def ode(controller, adjoint, first_step=None):
    import diffrax

    adjoint, controller = getattr(diffrax, adjoint)(), controller(diffrax)

    def loss(p):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, p: field(p, y)),
            diffrax.Tsit5(),
            *(0.0, 3.0, first_step, Y, p),
            stepsize_controller=controller,
            adjoint=adjoint,
            max_steps=64,
        )
        return jnp.mean(solution.ys**2)

    return loss


def adaptive(diffrax):
    return diffrax.PIDController(rtol=1e-3, atol=1e-6)


def constant(diffrax):
    return diffrax.ConstantStepSize()


def checkpointed_loop(p):
    """A loop of Equinox that halves its step where the change is too large."""
    import equinox as eqx

    def step(carry):
        y, h, t = carry
        new = y + h * field(p, y)
        accepted = jnp.abs(new - y).max() < 0.1
        return jnp.where(accepted, new, y), jnp.where(accepted, 1.3 * h, h / 2), jnp.where(accepted, t + h, t)

    start = Y, jnp.float32(0.5), jnp.float32(0)
    y, _, t = eqx.internal.while_loop(
        lambda carry: carry[2] < 2.0, step, start, kind="checkpointed", max_steps=256, checkpoints=16
    )
    return jnp.mean(y**2) + 0.1 * t


def contraction(p, z):
    return 0.5 * jnp.tanh(z @ p["w"] @ p["v"]) + Y


def fixed_point(p):
    import optimistix

    solver = optimistix.FixedPointIteration(rtol=1e-5, atol=1e-6)
    found = optimistix.fixed_point(lambda z, p: contraction(p, z), solver, jnp.zeros_like(Y), p, throw=False)
    return jnp.mean(found.value**2)


def fixed_point_of_jaxopt(p):
    import jaxopt

    solver = jaxopt.FixedPointIteration(lambda z, p: contraction(p, z), tol=1e-5, maxiter=100)
    return jnp.mean(solver.run(jnp.zeros_like(Y), p).params ** 2)


SOLVERS = {
    "adaptive": functools.partial(ode, adaptive, "RecursiveCheckpointAdjoint"),
    "adaptive, backsolve": functools.partial(ode, adaptive, "BacksolveAdjoint"),
    "constant": functools.partial(ode, constant, "RecursiveCheckpointAdjoint", 0.3),
    "checkpointed loop": lambda: checkpointed_loop,
    "fixed point": lambda: fixed_point,
    "fixed point of jaxopt": lambda: fixed_point_of_jaxopt,
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_gradient_through_a_solver_is_that_of_float32(name, order):
    loss = SOLVERS[name]()
    found = jax.jit(in_order(order, loss, "bfloat16"))(PARAMS)
    assert error(found, jax.jit(jax.grad(loss))(PARAMS)) < 0.03


def test_a_solver_of_constant_steps_runs_its_network_in_half():
    """diffrax's own sum over stages asks for a precision."""
    report = jmp.explain(jmp.autocast(jax.grad(SOLVERS["constant"]())))(PARAMS)
    of_network = [
        operation for operation in report.operations if operation.is_product and "field" in operation.source
    ]
    assert of_network
    assert all(operation.in_half for operation in of_network)
