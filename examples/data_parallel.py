"""One model on many devices of many machines: float16, a dynamic loss scale, checkpoints of sharded state.

    python examples/data_parallel.py gpt2-small --processes 2              # Two processes on this machine.
    python examples/data_parallel.py gpt2-small --processes 2 --fsdp       # Parameters are split, too.
    srun python examples/data_parallel.py gpt2-small --cluster             # SLURM: one process a GPU.
    python examples/data_parallel.py gpt2-small --processes 2 --process-id 0 --coordinator node0:1234
    python examples/data_parallel.py gpt2-small --size full --program 256  # The collectives for 256 H100s.

Each process runs the same program (`jax.distributed`). The batch is split over all devices. XLA inserts the
cross-device reductions, so the train step is that of one device (`models/training.py`). With `--checkpoint`
the program saves as it goes; killed and started again, it continues, also on another number of devices.
docs/many-devices.md explains it.
"""

import argparse
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import FAMILIES
from models.training import make_train_step
from models.workload import Workload
from tqdm import tqdm

import jmp_lite as jmp
from jmp_lite.programs import Program, mesh_for, read_program

POLICY = jmp.get_policy("params=float32,compute=float16,output=float32")
# The scale doubles every 20 steps because these runs are short. Leave 2000 for thousands of steps.
LOSS_SCALE = jmp.DynamicLossScale(2.0**15, period=20)


# The processes.


def start_others(count: int) -> str:
    """Starts processes 1, 2, ... of this program on this machine, and returns the address of process 0."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    for index in range(1, count):
        numbered = ["--process-id", str(index), "--coordinator", coordinator]
        subprocess.Popen([sys.executable, *sys.argv, *numbered])
    return coordinator


def join_processes(options: argparse.Namespace) -> None:
    """Connects this process with the others. Must run before JAX looks for devices."""
    if options.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    if options.cluster:
        jax.distributed.initialize()  # SLURM, Open MPI, Kubernetes and TPU pods tell it all.
    elif options.processes > 1:
        if options.process_id is None:
            options.process_id, options.coordinator = 0, start_others(options.processes)
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process_id,
            initialization_timeout=60,
            heartbeat_timeout_seconds=10,  # If one process dies, JAX ends the others after this time.
        )


# The arrays.


def split_longest_axis(x: jax.ShapeDtypeStruct, devices: int) -> P:
    """Splits the longest axis over all devices, except for tiny arrays and for axes that do not divide."""
    axis = max(range(len(x.shape)), key=lambda axis: x.shape[axis], default=0)
    fits = x.size >= 2**10 and x.shape[axis] % devices == 0
    return P(*(None,) * axis, "data") if fits else P()


class Training:
    """The step and the state of a workload on a mesh of devices.

    Attributes:
        state: shapes, dtypes and shardings of parameters, statistics and optimizer state.
        batch_sharding: the sharding of the batch: its first axis is split over all devices.
        init: makes the state, each part on its devices.
        train_step: takes the three parts of the state and a batch. It returns new ones and a dict of scalars:
            the loss, and what `jmp.get_metrics` says.
    """

    def __init__(
        self, workload: Workload, mesh: Mesh, fsdp: bool, reduce_dtype: Literal["float32"] | None
    ) -> None:
        tx = jmp.with_loss_scale(workload.optimizer(), LOSS_SCALE)

        def init() -> tuple[Any, Any, Any]:
            statistics = workload.init(0)
            params = statistics.pop("params")
            return params, statistics, tx.init(params)

        def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = split_longest_axis(x, mesh.size) if fsdp else P()
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        self.state = jax.tree.map(placed, jax.eval_shape(init))
        self.batch_sharding = NamedSharding(mesh, P("data"))
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        self.init = jax.jit(init, out_shardings=shardings)
        step = make_train_step(workload, POLICY, tx, reduce_dtype=reduce_dtype)

        def train_step(params: Any, statistics: Any, opt_state: Any, batch: Any) -> Any:
            params, statistics, opt_state, (loss, _) = step(params, statistics, opt_state, batch)
            return params, statistics, opt_state, {"loss": loss, **jmp.get_metrics(opt_state)}

        # Without `out_shardings` XLA would choose where the new state lies.
        outputs = (*shardings, NamedSharding(mesh, P()))
        self.train_step = jax.jit(train_step, donate_argnums=(0, 1, 2), out_shardings=outputs)

    def split(self, batch: Any) -> Any:
        """Places a batch of NumPy arrays: each process gives its devices their rows."""
        place = lambda x: jax.make_array_from_callback(x.shape, self.batch_sharding, lambda rows: x[rows])
        return jax.tree.map(place, batch)

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """Compiles the step for the shapes of a batch of NumPy arrays."""
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.batch_sharding)
        return self.train_step.lower(*self.state, jax.tree.map(shape, batch)).compile()


def describe_collectives(program: Program) -> str:
    """Returns a line for each kind and dtype: how often it runs in a step, and what a device sends."""
    found: dict[tuple[str, str], list[int]] = {}
    for each in program.collectives:
        for array in each.arrays:
            row = found.setdefault((each.kind, array.dtype), [0, 0])
            row[0] += each.times
            row[1] += array.size * each.times
    lines = [f"{kind:20}{dtype:6}{arrays:7,}{size:15,}" for (kind, dtype), (arrays, size) in found.items()]
    return "\n".join([f"{'collective':20}{'dtype':6}{'arrays':>7}{'bytes':>15}", *lines])


# The run.


@dataclasses.dataclass
class Run:
    """What is left of a run.

    Attributes:
        params, statistics, opt_state: the last state, sharded.
        history: of each step of this run, the loss, the scale, whether the gradients were finite, and how
            many steps were skipped until then.
    """

    params: Any
    statistics: Any
    opt_state: Any
    history: list[dict[str, float]]


def open_checkpoints(options: argparse.Namespace) -> ocp.CheckpointManager | None:
    """Opens the folder of checkpoints, if the command line names one."""
    if options.checkpoint is None:
        return None
    settings = ocp.CheckpointManagerOptions(
        max_to_keep=2, save_interval_steps=options.save_every, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(options.checkpoint.absolute(), options=settings)


def restore_newest(checkpoints: ocp.CheckpointManager, target: Any) -> tuple[int, Any] | None:
    """Restores the newest checkpoint that can be read, and deletes those after it, which cannot.

    Returns:
        Its step and its state; None if there is no checkpoint.

    Raises:
        Exception: there are checkpoints and none can be read. Then nothing is deleted: they may be those of
            another model.
    """
    unreadable: list[int] = []
    last = None
    for step in sorted(checkpoints.all_steps(), reverse=True):
        try:
            state, error = checkpoints.restore(step, args=ocp.args.StandardRestore(target)), None
        except Exception as caught:
            state, error = None, caught
        # All processes go on from the same step. If one process alone cannot read it, Orbax may end them all.
        if multihost_utils.process_allgather(np.array(error is None)).all():
            for broken in unreadable:
                checkpoints.delete(broken)  # A step that is there is not saved again.
            return step, state
        unreadable.append(step)
        reason = "another process could not read it" if error is None else f"{type(error).__name__}: {error}"
        if jax.process_index() == 0:
            print(f"The checkpoint of step {step} cannot be read ({reason[:200]}).", flush=True)
        last = error or RuntimeError(f"No process may go on: {reason}.")
    if last is not None:
        raise last
    return None


def train(workload: Workload, options: argparse.Namespace) -> Run:
    """Trains on batches 1, 2, ... with all devices of all processes."""
    devices = jax.device_count()
    batch_size = options.batch or workload.batch_size
    if batch_size % devices:
        raise SystemExit(f"{batch_size} examples do not divide among {devices} devices: change --batch.")
    first = jax.process_index() == 0  # One process speaks for all.
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    training = Training(workload, mesh, options.fsdp, options.reduce_dtype)
    train_step = training.compile(workload.batch(0, batch_size))
    if first:
        print(f"{jax.process_count()} processes, {devices} devices: {jax.devices()[0].device_kind}")
        print(describe_collectives(read_program(train_step)), flush=True)

    checkpoints = open_checkpoints(options)
    start, state = (checkpoints and restore_newest(checkpoints, training.state)) or (0, None)
    if state is None:
        state = training.init()
    elif first:
        print(f"Continues from step {start}.", flush=True)
    params, statistics, opt_state = state

    history: list[dict[str, float]] = []
    waiting: list[dict[str, jax.Array]] = []  # Metrics that the host has not read.
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(options.log.open("a")) if first and options.log is not None else None
        progress = stack.enter_context(
            tqdm(total=options.steps, initial=start, unit="step", disable=None if first else True)
        )
        for step in range(start + 1, options.steps + 1):
            batch = training.split(workload.batch(step, batch_size))
            params, statistics, opt_state, metrics = train_step(params, statistics, opt_state, batch)
            waiting.append(metrics)
            progress.update()
            if step % options.log_every == 0 or step == options.steps:
                # Only here the host waits for the devices.
                for row in jax.device_get(waiting):
                    history.append(
                        {"step": start + len(history) + 1, **{k: float(v) for k, v in row.items()}}
                    )
                    if log is not None:
                        print(json.dumps(history[-1]), file=log, flush=True)
                waiting.clear()
                progress.set_postfix(loss=f"{history[-1]['loss']:.3f}", scale=history[-1]["loss_scale"])
                jmp.raise_if_stuck(opt_state)
            if checkpoints is not None:  # Copies the state to the host, and writes it in the background.
                save = ocp.args.StandardSave((params, statistics, opt_state))
                checkpoints.save(step, args=save, force=step == options.steps)
    if checkpoints is not None:
        checkpoints.close()  # Waits for the last one.
    if first and history:
        last = history[-1]
        print(f"step {options.steps}: loss {last['loss']:.4f}, {last['skipped_steps']:.0f} steps skipped")
    return Run(params, statistics, opt_state, history)


def print_program(workload: Workload, options: argparse.Namespace) -> None:
    """Prints the collectives of the step that an H100 of many would run. Needs no GPU; runs nothing."""
    mesh = mesh_for("h100", {"data": options.program})
    training = Training(workload, mesh, options.fsdp, options.reduce_dtype)
    batch_size = options.batch or options.program * workload.batch_size
    print(describe_collectives(read_program(training.compile(workload.batch(0, batch_size)))))


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("family", choices=FAMILIES, help="the model")
    parser.add_argument(
        "--size", choices=["small", "full"], default="small", help="of the model (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of training (default: %(default)s)")
    parser.add_argument(
        "--batch",
        type=int,
        help="examples in a step, on all devices together; by default as the model has it",
    )
    parser.add_argument("--fsdp", action="store_true", help="split parameters and optimizer state, too")
    parser.add_argument("--reduce-dtype", choices=["float32"], help="of the sums of weight gradients")
    parser.add_argument(
        "--checkpoint", type=Path, help="a folder that all processes see, to save to and continue from"
    )
    parser.add_argument(
        "--save-every", type=int, default=50, help="steps between checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--log", type=Path, help="a file to which process 0 appends a JSON line for each step"
    )
    parser.add_argument(
        "--log-every", type=int, default=10, help="steps between two looks at the loss (default: %(default)s)"
    )
    parser.add_argument(
        "--program", type=int, metavar="N", help="print the collectives for N H100s, and do not train"
    )
    processes = parser.add_argument_group("processes")
    processes.add_argument(
        "--processes",
        type=int,
        default=1,
        help="how many; without --process-id all start here (default: %(default)s)",
    )
    processes.add_argument("--devices", type=int, help="virtual CPU devices of each process")
    processes.add_argument("--cluster", action="store_true", help="SLURM or another cluster starts them")
    processes.add_argument("--process-id", type=int, help="which one this is, from 0")
    processes.add_argument("--coordinator", help="host:port of process 0")
    options = parser.parse_args(arguments)
    if (options.process_id is None) != (options.coordinator is None):
        parser.error("--process-id and --coordinator go together.")
    counts = (options.steps, options.save_every, options.log_every, options.processes)
    if min(counts) < 1:
        parser.error("--steps, --save-every, --log-every and --processes must be at least 1.")
    try:
        if options.checkpoint is not None:
            options.checkpoint.mkdir(parents=True, exist_ok=True)
        if options.log is not None:
            options.log.open("a").close()
    except OSError as error:
        parser.error(f"cannot write {error.filename}: {error.strerror}.")
    return options


def main(arguments: list[str] | None = None) -> Run | None:
    options = read_options(arguments)
    workload = getattr(FAMILIES[options.family], options.size)()
    if options.program is not None:
        return print_program(workload, options)
    join_processes(options)
    return train(workload, options)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Stopped.") from None
