"""The arms in JAX: a training step of one model in several precisions, with several loss scales."""

import dataclasses
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from benchmarks.arms.loss_scalers import SCALE, SCALERS
from examples.models.workload import Workload
from jmp_lite.linen import with_policy
from jmp_lite.programs import Program, read_program


@dataclasses.dataclass(frozen=True)
class Precision:
    """The precision of an arm.

    Attributes:
        arithmetic: the dtype that products must multiply, in the words of `jmp_lite.programs.Matmul`.
        casts: what casts: `none`, `policy` or `autocast`.
        scaler: one of `SCALERS`.
        cudnn: whether attention is that of cuDNN, and not that of XLA.
    """

    arithmetic: str
    casts: str = "none"
    scaler: str = "plain"
    cudnn: bool = False

    @property
    def dtype(self) -> Any:
        """The dtype of the operands of products."""
        return {"f16": jnp.float16, "bf16": jnp.bfloat16}.get(self.arithmetic, jnp.float32)

    @property
    def matmul_precision(self) -> str | None:
        """The value for `jax.default_matmul_precision`."""
        return {"f32": "highest", "tf32": "tensorfloat32"}.get(self.arithmetic)


JAX_ARMS = {
    "float32": Precision("f32"),
    "TF32": Precision("tf32"),
    "bfloat16": Precision("bf16", "policy"),
    "float16": Precision("f16", "policy", "jmp_lite"),
    "float16 autocast": Precision("f16", "autocast", "jmp_lite"),
    "float16 unchecked": Precision("f16", "policy", "plain"),
    "float16 jmp": Precision("f16", "policy", "jmp 0.0.4"),
    "float16 Flax DynamicScale": Precision("f16", "policy", "Flax DynamicScale"),
}
CUDNN_ARMS = {
    f"{name}, cuDNN attention": dataclasses.replace(JAX_ARMS[name], cudnn=True)
    for name in ("bfloat16", "float16", "float16 autocast")
}


def cudnn_attention(dtype: Any, *operands: jax.Array, is_causal: bool = False) -> jax.Array:
    """Calls cuDNN's fused attention, which takes only half precision; arguments as in `models.attention`.

    Under a policy the operands are half precision already. Autocast traces in float32, which cuDNN rejects.
    """
    query, key, value = (x.astype(dtype) for x in operands)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation="cudnn")
    return attend(query, key, value).astype(operands[0].dtype)


class JaxArm:
    """A training step of one arm.

    Args:
        name: one of `JAX_ARMS` or `CUDNN_ARMS`.
        workload: the model and its training.
        batch_size: the number of examples in a step.
    """

    def __init__(self, name: str, workload: Workload, batch_size: int):
        self.precision = (JAX_ARMS | CUDNN_ARMS)[name]
        self.workload, self.batch_size = workload, batch_size
        self.scaler = SCALERS[self.precision.scaler](workload.optimizer())
        self.lowered: Any = None
        self.lower_seconds = 0.0
        self.run: Any = None
        self.state: Any = None
        self.batch: Any = None

    def initial_state(self, scale: float = SCALE) -> Any:
        """Returns parameters, state of the scaler and statistics."""
        variables = self.workload.init(0)
        params = variables.pop("params")
        return params, self.scaler.init(params, scale), variables

    def loss(self, params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        """Returns the loss in the precision of the arm, and new statistics."""
        precision, model = self.precision, self.workload.model
        if precision.cudnn:
            model = model.clone(attention=functools.partial(cudnn_attention, precision.dtype))
        if precision.casts == "policy":
            model = with_policy(model, jmp.Policy(jnp.float32, precision.dtype, jnp.float32))

        def plain(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
            inputs, targets = batch
            variables = {"params": params, **statistics}
            outputs, statistics = model.apply(variables, *inputs, mutable=list(statistics))
            return self.workload.loss(outputs, targets), statistics

        fun = jmp.autocast(plain, precision.dtype) if precision.casts == "autocast" else plain
        return fun(params, statistics, batch)

    def step(self, state: Any, batch: Any) -> tuple[Any, jax.Array]:
        """Takes a training step. Its caller jits it and donates the state."""
        params, scaler_state, statistics = state
        loss = lambda params: self.loss(params, statistics, batch)
        with jax.default_matmul_precision(self.precision.matmul_precision):
            *state, value = self.scaler.step(loss, params, scaler_state, statistics)
        return tuple(state), value

    def shapes(self) -> tuple[Any, Any]:
        """Returns the shapes of state and batch, to compile with."""
        state, batch = jax.eval_shape(self.initial_state), self.workload.batch(0, self.batch_size)
        return state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

    def lower(self) -> jax.stages.Lowered:
        """Traces the step and checks the arithmetic of the trace. This does not use the GPU.

        Raises:
            AssertionError: a product multiplies another dtype than the arm claims.
        """
        began = time.perf_counter()
        self.lowered = jax.jit(self.step, donate_argnums=0).lower(*self.shapes())
        check_lowered(self.lowered.as_text(), self.precision)
        self.lower_seconds = time.perf_counter() - began
        return self.lowered

    def compile(self) -> dict[str, Any]:
        """Compiles the step and checks its arithmetic. It traces the step first if `lower` was not called.

        Returns:
            The seconds that both took, and the `facts` of the program.

        Raises:
            AssertionError: a product multiplies another dtype than the arm claims.
        """
        lowered = self.lowered or self.lower()
        began = time.perf_counter() - self.lower_seconds
        self.run = lowered.compile()
        program = read_program(self.run)
        if program.device != "cpu":  # A CPU computes float16 in float32.
            check_program(program, self.precision)
        seconds = time.perf_counter() - began
        self.batch = jax.device_put(self.workload.batch(0, self.batch_size))
        self.state = self.initial_state()
        return {"compile_seconds": round(seconds, 1), **facts(program)}

    def steps(self, count: int) -> float:
        """Takes `count` steps, waits for the last one and returns its loss."""
        assert self.run is not None, "compile first"
        for _ in range(count):
            self.state, loss = self.run(self.state, self.batch)
        return float(loss)  # type: ignore[possibly-unbound]

    def peak_bytes(self) -> int | None:
        """Returns the peak of the memory in use, in bytes; None if the device does not report it."""
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    def overflow(self, scale: float, limit: int) -> list[float] | None:
        """Starts again with a scale that overflows, and takes steps until one is not skipped.

        Args:
            scale: the initial scale.
            limit: the largest number of steps.

        Returns:
            The scale before the first step and after each; None if the arm does not adapt its scale.
        """
        if self.precision.scaler == "plain":
            return None
        self.state = None  # This frees the memory.
        self.state = self.initial_state(scale)
        read = lambda: float(self.scaler.scale(self.state[1]))
        scales = [read()]
        while len(scales) <= limit and (len(scales) < 2 or scales[-1] < scales[-2]):
            self.steps(1)
            scales.append(read())
        return scales


# The dtype that products multiply is checked twice: in StableHLO, and in the program that XLA compiled.

_PRODUCT = re.compile(
    r"stablehlo\.(?:dot_general|convolution)\b.*: \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor"
)
_PINNED = {"f32": "HIGHEST", "tf32": "HIGH"}


def check_lowered(text: str, precision: Precision) -> None:
    """Raises AssertionError if a product in StableHLO does not have the claimed arithmetic."""
    dtype = precision.arithmetic if precision.arithmetic in ("f16", "bf16") else "f32"
    products = [line for line in text.splitlines() if _PRODUCT.search(line)]
    assert products, "the program has no matmuls"
    for line in products:
        operands = [shape.split("x")[-1] for shape in _PRODUCT.search(line).groups()]  # type: ignore[union-attr]
        assert operands == [dtype, dtype], f"claimed {precision.arithmetic}: {line.strip()}"
        asked = set(re.findall(r"\b(HIGHEST|HIGH|DEFAULT|TF32_TF32_F32)\b", line))
        wanted = _PINNED.get(precision.arithmetic)
        assert wanted is None or asked == {wanted}, f"claimed {precision.arithmetic}: {line.strip()}"


def check_program(program: Program, precision: Precision) -> None:
    """Raises AssertionError if a product in a GPU's program does not have the claimed arithmetic."""
    for product in program.matmuls:
        assert product.arithmetic == precision.arithmetic, f"claimed {precision.arithmetic}: {product}"
    assert program.matmuls, "the program has no matmuls"


def facts(program: Program) -> dict[str, Any]:
    """Returns the figures of a program that are kept, ready for JSON."""
    products: dict[str, int] = {}
    for product in program.matmuls:
        name = f"{product.kind} {product.arithmetic}"
        products[name] = products.get(name, 0) + product.times
    in_place = program.aliased_bytes
    return {
        "device": program.device,
        "kernels": program.kernels,
        "products": products,
        "program_bytes": program.temporary_bytes + program.argument_bytes + program.output_bytes - in_place,
        "bytes_moved": program.bytes_moved,
        "host_syncs": len(program.host_syncs),
    }


def arms_of(workload: Workload) -> dict[str, Precision]:
    """Returns the arms of a workload: those with cuDNN's attention only if the model has attention."""
    return JAX_ARMS | (CUDNN_ARMS if hasattr(workload.model, "attention") else {})
