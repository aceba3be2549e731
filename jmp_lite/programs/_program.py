"""The report of `read_program`: matmuls and their dtypes, kernels, bytes, memory, collectives."""

import dataclasses
from collections.abc import Iterator

from .._text import Shown, aligned
from ._hlo import HloArray
from ._matmuls import Matmul

_WIDE = ("tf32", "tf32_x3", "f32", "f64", "c64", "c128")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A communication between devices.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, ...
        arrays: the arrays that each device sends.
        times: how many times it runs.
        operation: the scopes and the JAX operation that it comes from.

    Examples:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> x = jax.device_put(jnp.ones((64, 4)), jax.NamedSharding(mesh, jax.P("data")))
        >>> program = read_program(jax.jit(lambda x: x.sum(0)).lower(x).compile())
        >>> [(collective.kind, collective.dtypes, collective.size) for collective in program.collectives]
        [('all-reduce', ('f32',), 16)]
    """

    kind: str
    arrays: tuple[HloArray, ...]
    times: int
    operation: str

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of the arrays, each once."""
        return tuple(sorted({array.dtype for array in self.arrays}))

    @property
    def size(self) -> int:
        """The number of bytes that each device sends."""
        return sum(array.size for array in self.arrays)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel or a library call.

    Attributes:
        name: the name of its instruction in the compiled program, which profiles use too.
        operation: the scopes and the JAX operation that it comes from.
        flops: floating point operations of its matmuls and convolutions in one run.
        bytes_moved: how many bytes one run reads and writes.
        float32_bytes: those of float32 arrays that are not arguments or outputs of the program.
        half_bytes: those of such arrays in half precision.
        times: how many times it runs.

    Examples:
        >>> program = read_program(jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile())
        >>> [(launch.flops, launch.bytes_moved, launch.times) for launch in program.launches]
        [(1024, 512, 1)]
    """

    name: str
    operation: str
    flops: int
    bytes_moved: int
    float32_bytes: int
    half_bytes: int
    times: int


@dataclasses.dataclass(frozen=True)
class Program(Shown):
    """The program of one device. `print(program)` gives a table of the matmuls, and the totals.

    Attributes:
        device: the kind of device for which it was compiled.
        matmuls: the matmuls, convolutions and attentions, in the order of the program.
        collectives: the communications between devices.
        launches: the kernels and library calls, in the order of the program.
        kernels: how many kernels and library calls one run starts, in every iteration of its loops.
        bytes_moved: how many bytes the kernels and library calls read and write.
        temporary_bytes: memory in addition to arguments and outputs.
        argument_bytes: memory of arguments.
        output_bytes: memory of outputs.
        aliased_bytes: memory of outputs that overwrite donated arguments.
        conditionals: how many conditionals it has. The figures above count all branches.
        host_syncs: why the host must wait for the device during a run: conditionals, callbacks, and loops
            whose length is known only on the device (counted as one iteration above).

    Examples:
        >>> program = read_program(jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile())
        >>> program.argument_bytes, program.output_bytes, program.conditionals, program.host_syncs
        (256, 256, 0, ())
    """

    device: str
    matmuls: tuple[Matmul, ...]
    collectives: tuple[Collective, ...]
    launches: tuple[Launch, ...]
    kernels: int
    bytes_moved: int
    temporary_bytes: int
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    conditionals: int
    host_syncs: tuple[str, ...]

    @property
    def tensor_core_share(self) -> float:
        """The share of the matmuls' FLOPs on Tensor Cores in 16 bits or less; 1 without matmuls."""

        # TF32 is rounded float32: it runs on Tensor Cores at half of their rate in 16 bits.
        def in_half(matmul):
            return matmul.on_tensor_cores and not matmul.arithmetic.startswith("tf32")

        flops = [(matmul.flops * matmul.times, in_half(matmul)) for matmul in self.matmuls]
        total = sum(count for count, _ in flops)
        return sum(count for count, half in flops if half) / total if total else 1.0

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(program: Program) -> Iterator[str]:
    yield from _lines_of_matmuls(program)
    share = f"{program.tensor_core_share:.1%} of the matmuls' FLOPs in 16 bits on Tensor Cores"
    if program.device == "cpu":
        share = "a CPU computes half precision by way of float32; see compile_for for the program of a GPU"
    yield f"on {program.device}: {share if program.matmuls else 'no matmuls'}"
    yield f"{program.kernels:,} kernels and library calls, {_megabytes(program.bytes_moved)} read and written"
    yield (
        f"memory: {_megabytes(program.argument_bytes)} arguments, {_megabytes(program.output_bytes)} outputs "
        f"({_megabytes(program.aliased_bytes)} in place), {_megabytes(program.temporary_bytes)} temporary"
    )
    syncs = f"{len(program.host_syncs)} host syncs {', '.join(program.host_syncs)}"
    yield f"{program.conditionals} conditionals, {syncs}".rstrip()
    for collective in program.collectives:
        size, dtypes = _megabytes(collective.size), ", ".join(collective.dtypes)
        yield f"{collective.times:>6}  {collective.kind} of {size} in {dtypes}"


def _lines_of_matmuls(program: Program) -> Iterator[str]:
    # A row for all matmuls of one kind in the same dtypes: a model has hundreds.
    rows: dict[tuple[str, ...], list[Matmul]] = {}
    for matmul in program.matmuls:
        inputs = " x ".join(array.dtype for array in matmul.operands)
        key = (matmul.kind, inputs, matmul.arithmetic, matmul.accumulation, matmul.result.dtype)
        rows.setdefault(key, []).append(matmul)
    table: list[tuple[str, ...]] = [
        ("matmul", "operands", "multiplies", "adds in", "result", "runs", "GFLOP")
    ]
    for words, matmuls in rows.items():
        flops = sum(matmul.flops * matmul.times for matmul in matmuls) / 1e9
        table.append((*words, str(sum(matmul.times for matmul in matmuls)), f"{flops:,.1f}"))
    yield from aligned(table, left=5) if rows else ()
    # If all of them are wide, the program is not in half, and a list of them would say nothing.
    wide = [matmul for matmul in program.matmuls if matmul.arithmetic in _WIDE]
    if wide and len(wide) < len(program.matmuls):
        yield "in float32 or wider:"
        for matmul in wide[:8]:
            yield f"    {matmul.operation}  {' x '.join(map(str, matmul.operands))}"
        if len(wide) > 8:
            yield f"    and {len(wide) - 8} more"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
