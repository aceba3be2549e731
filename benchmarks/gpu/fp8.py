"""A trial of autocast to fp8: one transformer block, forward and backward, in bfloat16 and in fp8.

    python -m benchmarks.gpu.fp8 --width 4096
    python -m benchmarks.gpu.fp8 --width 64 --tokens 128 --steps 2    # Anywhere: shows that it works.

The block reads 8,192 tokens. Both arms run under autocast to bfloat16. In the fp8 arm each large product
without batch axes takes operands in fp8 instead. An operand is scaled by a power of two, so that its largest
magnitude comes just below the largest number of the dtype: e4m3 for activations and weights, e5m2 for
cotangents. Both are compiled with Triton's GEMMs and without. If fp8 is below 1.15 times as fast as bfloat16
at width 4096, the idea is dropped.

Nothing in `jmp_lite` imports this file. The dtypes and the scaling are those of Micikevicius et al., FP8
formats for deep learning (2022).
"""

import argparse
import functools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jmp_lite as jmp
from benchmarks.arms.jax_arms import cudnn_attention
from benchmarks.device import HAS_GPU, clocks, device_name, versions
from benchmarks.gpu.files import write_atomically
from examples.models.attention import attention
from examples.models.gpt2 import Block
from jmp_lite._autocast.api import prepare
from jmp_lite._autocast.calls import HANDLERS
from jmp_lite._autocast.interpreter import Interpreter, Value
from jmp_lite._autocast.planning.plan import Bind, conversion
from jmp_lite._autocast.planning.rules import make_rules
from jmp_lite._autocast.planning.states import FIRM
from jmp_lite.diagnostics import read_program

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
MULTIPLE = 16  # cuBLAS multiplies fp8 only if all sizes are multiples of 16.
SMALLEST = 64  # Smaller products cost more in casts than fp8 saves.
LEAST, AT_WIDTH = 1.15, 4096  # The rule that decides about the idea.


# A product in fp8.


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns `x` in an fp8 dtype, and the float32 scalar by which it must be multiplied."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    top = float(jnp.finfo(dtype).max)
    usable = (largest > 0) & jnp.isfinite(largest)
    _, exponent = jnp.frexp(top / jnp.where(usable, largest, top))
    scale = jnp.ldexp(jnp.float32(1), jnp.clip(exponent - 1, -100, 100))  # bfloat16 holds it and its inverse.
    return (x * scale.astype(x.dtype)).astype(dtype), 1 / scale


def multiply(a: Any, b: Any, dimensions: Any, dtype: Any) -> jax.Array:
    """Returns the product of two pairs of `quantize`.

    The scales are multiplied into the result. With Triton's GEMMs XLA would run a product of scaled operands
    in bfloat16.
    """
    (left, left_scale), (right, right_scale) = a, b
    product = lax.dot_general(left, right, dimensions, preferred_element_type=dtype)
    return product * (left_scale * right_scale).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fp8_product(x: jax.Array, w: jax.Array, dimensions: Any, dtype: Any) -> jax.Array:
    """Returns `lax.dot_general` of two bfloat16 arrays without batch axes, computed in fp8."""
    return _forward(x, w, dimensions, dtype)[0]


def _forward(x: jax.Array, w: jax.Array, dimensions: Any, dtype: Any) -> Any:
    left, right = quantize(x, FORWARD), quantize(w, FORWARD)
    return multiply(left, right, dimensions, dtype), (left, right)


def _backward(dimensions: Any, dtype: Any, kept: Any, cotangent: jax.Array) -> Any:
    left, right = kept
    (left_axes, right_axes), _ = dimensions
    left_free = [axis for axis in range(left[0].ndim) if axis not in left_axes]
    right_free = [axis for axis in range(right[0].ndim) if axis not in right_axes]
    of_left = tuple(range(len(left_free)))
    of_right = tuple(range(len(left_free), cotangent.ndim))
    change = quantize(cotangent, BACKWARD)

    # The axes of a result: those of the cotangent that stay, then the contracted ones in the other's order.
    dx = multiply(change, right, ((of_right, tuple(right_free)), ((), ())), dtype)
    order = left_free + [left_axes[i] for i in np.argsort(right_axes)]
    dx = jnp.transpose(dx, np.argsort(order).tolist())
    dw = multiply(left, change, ((tuple(left_free), of_left), ((), ())), dtype)
    order = [right_axes[i] for i in np.argsort(left_axes)] + right_free
    return dx, jnp.transpose(dw, np.argsort(order).tolist())


fp8_product.defvjp(_forward, _backward)


# autocast with it.


def suits(dimensions: Any, left: jax.Array, right: jax.Array) -> bool:
    """Returns whether fp8 pays for a product: no batch axes, sizes that are multiples of 16 and large."""
    (left_axes, _), (batch_axes, _) = dimensions
    inner = math.prod(left.shape[axis] for axis in left_axes)
    sizes = left.size // inner, inner, right.size // inner
    return not batch_axes and all(size % MULTIPLE == 0 and size >= SMALLEST for size in sizes)


class Fp8Interpreter(Interpreter):
    """autocast's interpreter. It runs products of two half operands in fp8 where that `suits`."""

    def _bind(self, equation: Any, action: Any, operands: list[Value]) -> list[Value]:
        if type(action) is Bind and equation.primitive.name == "dot_general":
            left, right = arrays = self._operands(equation, action, operands)
            dimensions = equation.params["dimension_numbers"]
            if left.dtype == right.dtype == self.half and suits(dimensions, left, right):
                asked = (equation.params | action.params).get("preferred_element_type")
                result: Any = fp8_product(*arrays, dimensions, jnp.dtype(self.half))
                results = [result.astype(asked or self.half)]
                return list(map(Value, self._narrowed(results, action.narrow)))
        return super()._bind(equation, action, operands)


def autocast_fp8(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fun` under autocast to bfloat16, with its large products in fp8."""

    @functools.wraps(fun)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        traced, planner, plan = prepare(fun, make_rules(jnp.bfloat16), args, kwargs)
        interpreter = Fp8Interpreter(planner, HANDLERS)
        values = interpreter.run(plan, list(map(Value, traced.arrays)))
        wanted: Sequence[Any] = [conversion(state, FIRM) for state in plan.results]
        return traced.outputs(interpreter.take_all(values, wanted))

    return autocast_fun


# The measurement.

CASTS: dict[str, Callable[..., Any]] = {
    "bfloat16": functools.partial(jmp.autocast, dtype=jnp.bfloat16),
    "fp8": autocast_fp8,
}


def block(width: int, tokens: int) -> tuple[Callable[..., jax.Array], Any, Any]:
    """Returns the loss of a block of a GPT-2, its parameters, and its batch.

    The loss is the sum of the outputs, weighted at random, so that the cotangents are as random as in a deep
    model. Heads have 128 features. On a GPU attention is that of cuDNN.
    """
    length = min(1024, tokens)
    attend = functools.partial(cudnn_attention, jnp.bfloat16) if HAS_GPU else attention
    model = Block(max(1, width // 128), attend)
    keys = jax.random.split(jax.random.key(0), 3)
    x, weights = jax.random.normal(keys[0], (2, tokens // length, length, width))
    params = jax.jit(model.init)(keys[1], x)

    def loss(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.vdot(model.apply(params, x).astype(jnp.float32), weights)  # type: ignore[union-attr]

    return loss, params, (x, weights)


def measure(width: int, tokens: int, steps: int, blocks: int) -> dict[str, Any]:
    """Times forward and backward of a block in both dtypes, with Triton's GEMMs and without."""
    loss, params, batch = block(width, tokens)
    arms: dict[str, Any] = {}
    found: dict[str, Any] = {}
    grads = {}
    for name, casts in CASTS.items():
        lowered = jax.jit(jax.value_and_grad(casts(loss), argnums=(0, 1))).lower(params, *batch)
        for triton in (False, True):
            arm = f"{name}, Triton's GEMMs {'on' if triton else 'off'}"
            run = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": triton})
            program = read_program(run)
            products: dict[str, int] = {}
            for product in program.products:
                kind = f"{product.target} {product.arithmetic}"
                products[kind] = products.get(kind, 0) + product.times
            found[arm] = {
                "kernels": program.kernels,
                "bytes_moved": program.bytes_moved,
                "products": products,
                "ms_blocks": [],
            }
            arms[arm] = run
            _, grads[name] = jax.block_until_ready(run(params, *batch))
    for turn in range(blocks + 1):
        for arm, run in arms.items():
            began = time.perf_counter()
            for _ in range(steps):
                last = run(params, *batch)
            jax.block_until_ready(last)  # type: ignore[possibly-unbound]
            if turn:  # The first turn warms up.
                found[arm]["ms_blocks"].append(1000 * (time.perf_counter() - began) / steps)
    for each in found.values():
        each["ms"] = statistics.median(each["ms_blocks"])
    return {"arms": found, **compared(found), "gradient_cosine": cosine(grads["bfloat16"], grads["fp8"])}


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Returns how many times as fast fp8 is as bfloat16, each with its faster kind of GEMM."""
    best = {
        name: min((each for arm, each in found.items() if arm.startswith(name)), key=lambda each: each["ms"])
        for name in CASTS
    }
    turns = [slow / fast for slow, fast in zip(best["bfloat16"]["ms_blocks"], best["fp8"]["ms_blocks"])]
    return {"times_bfloat16": statistics.median(turns)}


def cosine(a: Any, b: Any) -> float:
    """Returns the cosine of the angle between two gradients."""
    dot = lambda a, b: sum(float(jnp.vdot(x, y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def main() -> None:
    """Measures one width, prints the times and writes them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=AT_WIDTH)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("out/fp8.json"))
    options = parser.parse_args()
    found: dict[str, Any] = {
        "device": device_name(),
        "versions": versions(),
        "width": options.width,
        "tokens": options.tokens,
        **measure(options.width, options.tokens, options.steps, options.blocks),
        "clocks": clocks(),
    }
    write_atomically(options.json, json.dumps(found, indent=1))
    for arm, each in found["arms"].items():
        print(f"{arm:32}{each['ms']:10.3f} ms {each['kernels']:6} kernels  {each['products']}")
    print(f"fp8 is {found['times_bfloat16']:.3f} times as fast; cosine {found['gradient_cosine']:.4f}")
    if options.width == AT_WIDTH:
        kept = "is kept" if found["times_bfloat16"] >= LEAST else "is dropped"
        print(f"The rule is {LEAST} times at width {AT_WIDTH}: on this device the idea {kept}.")


if __name__ == "__main__":
    main()
