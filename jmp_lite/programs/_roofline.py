"""Estimates how fast a compiled step can be, and what half precision can gain, module by module.

The time of a kernel is at least that of its arithmetic at the device's peak rate, of its bytes at the memory
bandwidth, and of a launch. The estimate is the largest of the three for each kernel.

Source: Williams, Waterman, Patterson, Roofline: an insightful visual performance model, CACM 2009; chapter 4
of NVIDIA's Training With Mixed Precision.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from .._paths import plain_scope, visible_scope
from .._text import Shown, aligned
from ._gpus import DEVICES, PRECISIONS, Device
from ._program import Launch, Program


@dataclasses.dataclass(frozen=True)
class ModuleTime:
    """The cost of one module.

    Attributes:
        module: its scope; forward and backward pass together.
        flops: floating point operations of its matmuls and convolutions in one run.
        bytes_moved: how many bytes its kernels read and write.
        launches: how many kernels and library calls it starts.
        bound: what limits most of its time: `arithmetic`, `memory` or `launches`.
        seconds: the estimate, by precision.
        fixed: the seconds in float16 of kernels that are no faster in half precision than in TF32.

    Examples:
        >>> w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
        >>> compiled = jax.jit(lambda w, x: x @ w).lower(w, w).compile()
        >>> module = roofline(read_program(compiled), "h100").modules[0]
        >>> module.bound, round(module.intensity)
        ('arithmetic', 683)
    """

    module: str
    flops: int
    bytes_moved: int
    launches: int
    bound: str
    seconds: Mapping[str, float]
    fixed: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0


@dataclasses.dataclass(frozen=True)
class Roofline(Shown):
    """An estimate of a step's time, by module. `print(report)` gives a table.

    Attributes:
        device: the GPU.
        modules: the modules, the slowest in float16 first.
        seconds: the whole step, by precision.

    Examples:
        >>> w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
        >>> compiled = jax.jit(lambda w, x: x @ w).lower(w, w).compile()
        >>> report = roofline(read_program(compiled), "h100")
        >>> report.device.name, f"{1e3 * report.seconds['float16']:.2f} ms", report.fixed_modules
        ('H100 SXM', '0.14 ms', ())
    """

    device: Device
    modules: tuple[ModuleTime, ...]
    seconds: Mapping[str, float]

    @property
    def fixed_modules(self) -> tuple[ModuleTime, ...]:
        """The modules with time that half precision does not reduce, those with most of it first."""
        return tuple(sorted((row for row in self.modules if row.fixed), key=lambda row: -row.fixed))

    @property
    def fixed_share(self) -> float:
        """The share of the time in float16 that half precision does not reduce, from 0 to 1."""
        return sum(row.fixed for row in self.modules) / self.seconds["float16"]

    def speedup(self, precision: str = "float16", over: str = "tf32") -> float:
        """Returns the best possible speedup of the step in `precision` over `over`."""
        return self.seconds[over] / self.seconds[precision]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def roofline(
    program: Program, device: str = "h100", *, depth: int = 2, launch_seconds: float = 2e-6
) -> Roofline:
    """Estimates the time of a compiled step in float32, TF32, bfloat16 and float16.

    For a precision that is not the program's own, it assumes that the matmuls run at the rate of that
    precision and that all arrays between kernels have its width. Arguments and outputs keep their dtypes. So
    the times in half are the best that half precision can reach.

    Args:
        program: the result of `read_program`. For a GPU that the machine does not have, see `compile_for`. A
            program for a CPU has other kernels than one for a GPU.
        device: `"v100"`, `"t4"`, `"a100"`, `"l4"`, `"h100"`, `"h200"` or `"b200"`. The `device.source` of
            the report names the data sheet of the GPU.
        depth: how many names of a scope make up a module.
        launch_seconds: the shortest time of a kernel.

    Returns:
        The estimate.

    Raises:
        ValueError: the device is not known, or `depth` or `launch_seconds` is out of range.
        TypeError: `program` is not a `Program`.

    Examples:
        >>> w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
        >>> compiled = jax.jit(lambda w, x: x @ w).lower(w, w).compile()
        >>> report = roofline(read_program(compiled), "h100")
        >>> round(report.speedup("float16", over="tf32"), 1)
        2.0
    """
    if not isinstance(program, Program):
        raise TypeError(
            "roofline(program, device) takes what read_program(step.lower(*args).compile()) returns. "
            f"Got {type(program).__name__}."
        )
    if device not in DEVICES:
        raise ValueError(f"The device should be one of {', '.join(map(repr, DEVICES))}. Got {device!r}.")
    if depth < 1 or launch_seconds < 0:
        raise ValueError(
            f"depth should be 1 or more, and launch_seconds 0 or more. Got {depth} and {launch_seconds}."
        )
    gpu = DEVICES[device]
    groups: dict[str, list[Launch]] = {}
    for launch in program.launches:
        groups.setdefault(module_of(launch.operation, depth), []).append(launch)
    rows = [_module(name, launches, gpu, launch_seconds) for name, launches in groups.items()]
    rows.sort(key=lambda row: -row.seconds["float16"])
    total = {precision: sum(row.seconds[precision] for row in rows) for precision in PRECISIONS}
    return Roofline(gpu, tuple(rows), total)


def module_of(operation: str, depth: int) -> str:
    """Returns the first names of a scope, without transforms and the operation itself."""
    # XLA joins the names of fused operations by semicolons. JAX repeats the scope of an operation that
    # `jax.checkpoint` computes again, as in `decoder/decoder/checkpoint/head`.
    scope = re.sub(r"(?<![^/])((?:[^/]+/)+)\1checkpoint/", r"\1", plain_scope(operation.partition(";")[0]))
    # A loop writes two names, and a branch is numbered. A scope of the user's may have the name of a part.
    scope = re.sub(r"(?<![^/])(while/(?:body|cond)|cond(?=/branch_\d+_fun))/", "", scope)
    names = visible_scope(scope).split("/")
    scopes = [name for name in names[:-1] if name not in _CALLS]
    return "/".join(scopes[:depth]) or "(no scope)"


# Names that calls add to scopes. A scope of the user's with one of these names looks the same, and is lost.
_CALLS = {"checkpoint", "shard_map", "closed_call", "eval_jaxpr"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "pjit"}


def _module(name: str, launches: list[Launch], device: Device, launch_seconds: float) -> ModuleTime:
    seconds: dict[str, float] = dict.fromkeys(PRECISIONS, 0.0)
    limits = {"arithmetic": 0.0, "memory": 0.0, "launches": 0.0}
    fixed = 0.0
    for launch in launches:
        times = {precision: _limits(launch, device, precision, launch_seconds) for precision in PRECISIONS}
        for precision, limit_seconds in times.items():
            seconds[precision] += launch.times * max(limit_seconds.values())
        bound = max(times["float16"], key=lambda limit: times["float16"][limit])
        # What limits the module is what limits most of its time, since its kernels differ.
        limits[bound] += launch.times * times["float16"][bound]
        # Equal within one percent, since the bytes of a kernel are split in proportion and rounded.
        if max(times["float16"].values()) >= 0.99 * max(times["tf32"].values()):
            fixed += launch.times * max(times["float16"].values())
    return ModuleTime(
        module=name,
        flops=sum(launch.flops * launch.times for launch in launches),
        bytes_moved=sum(launch.bytes_moved * launch.times for launch in launches),
        launches=sum(launch.times for launch in launches),
        bound=max(limits, key=lambda limit: limits[limit]),
        seconds=seconds,
        fixed=fixed,
    )


def _limits(launch: Launch, device: Device, precision: str, launch_seconds: float) -> dict[str, float]:
    """Returns the shortest time of one run of a kernel by each of the three limits."""
    # Arrays between kernels are assumed in the width of the precision: float32 arrays lose half of their
    # bytes, half arrays gain as many as they have.
    moved = launch.bytes_moved
    if precision in ("bfloat16", "float16"):
        moved -= launch.float32_bytes / 2
    else:
        moved += launch.half_bytes
    return {
        "arithmetic": launch.flops / device.flops[precision],
        "memory": moved / device.bandwidth,
        "launches": launch_seconds,
    }


def _lines(report: Roofline) -> Iterator[str]:
    device = report.device
    yield (
        f"an estimate for {device.name}: {device.memory / 1e9:.0f} GB, {device.bandwidth / 1e12:.2f} TB/s; "
        f"in float16 arithmetic is the limit from {device.balance('float16'):,.0f} FLOP a byte"
    )
    rows = [("module", "bound by", "GFLOP", "MB", "FLOP/B", *PRECISIONS), *map(_row, report.modules)]
    totals = (f"{1e3 * report.seconds[precision]:.3f}" for precision in PRECISIONS)
    yield from aligned([*rows, ("all", *[""] * 4, *totals)], left=2)
    yield "times in milliseconds"
    over_tf32, over_float32 = report.speedup(), report.speedup(over="float32")
    yield f"float16 is at best {over_tf32:.2f} times as fast as TF32 and {over_float32:.2f} times as float32"
    if slow := report.fixed_modules[:5]:
        names = ", ".join(f"{row.module} {1e3 * row.fixed:.3f} ms" for row in slow)
        yield f"no faster in float16 than in TF32, {report.fixed_share:.0%} of the time: {names}"


def _row(row: ModuleTime) -> tuple[str, ...]:
    name = row.module if len(row.module) < 32 else f"...{row.module[-28:]}"
    sizes = f"{row.flops / 1e9:,.1f}", f"{row.bytes_moved / 1e6:,.1f}", f"{row.intensity:,.0f}"
    return name, row.bound, *sizes, *(f"{1e3 * row.seconds[precision]:.3f}" for precision in PRECISIONS)
