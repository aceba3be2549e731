"""How fast one model trains: every arm of JAX and of PyTorch, side by side on one GPU.

    python -m benchmarks.run gpt2-small            # On a GPU, within ten minutes.
    python -m benchmarks.run gpt2-small --quick    # Anywhere, at a small size: proves that it works.

Each arm is a process (`benchmarks.worker`) with the same initial values and the same batch. They compile one
after another, so that what XLA tries out is not disturbed, and then take turns: a block of steps of one arm,
a block of the next. As many are timed together as the memory holds, and float16 with each of them, so that
two arms that never ran together are compared by their ratios to it. `python -m benchmarks.table` draws what
was found.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.device import clocks, device_name, memory_bytes, versions
from benchmarks.flops import training_flops
from benchmarks.h100 import HAS_GPU
from benchmarks.worker import ArmFailed, Worker
from examples.models import FAMILIES
from examples.models.workload import Workload

REFERENCE = "float16"
TORCH_ARMS = ("torch float32", "torch TF32", "torch bfloat16", "torch float16")
FLASH_ARMS = ("torch bfloat16, flash", "torch float16, flash")
# Those that the targets are about come first, in case that time runs out.
WANTED = (REFERENCE, "float32", "TF32", "torch float16", "float16 autocast", "bfloat16", "float16 unchecked")
WANTED += ("float16, cuDNN attention", "torch float16, flash", "torch TF32", "torch float32")
OVERFLOWING = 2.0**40  # A scale that no gradient survives in float16.


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How arms are timed: steps to warm up, and blocks of steps with one wait at the end of each."""

    warm_up: int = 10
    blocks: int = 5
    steps: int = 20


@dataclasses.dataclass
class Session:
    """The arms of one family, compiled and timed.

    Attributes:
        arms: their names, the most wanted first; `REFERENCE` is timed with all others.
        settings: of `benchmarks.worker`.
        protocol: how they are timed.
        memory: how many bytes those that are timed together may take.
        deadline: on `time.monotonic`'s clock; what is not compiled by then is left out.
        arm_seconds: how long an arm may take to answer; the reference, without which there are no ratios,
            may take three times as long.
        logs: a folder for what the processes write.
        save: called with the results so far as often as there is one more.
        results: what was found of each arm.
        clocks: what the GPU said of itself while it worked, once a group.
    """

    arms: list[str]
    settings: dict[str, Any]
    protocol: Protocol
    memory: float
    deadline: float
    arm_seconds: float
    logs: pathlib.Path
    save: Callable[[], None] = lambda: None
    results: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    clocks: list[dict[str, str]] = dataclasses.field(default_factory=list)
    reference: str = REFERENCE

    def run(self) -> None:
        """Compiles and times all arms; `results` has what was found of each, or the `error` that ended it."""
        pending = [self._start(arm) for arm in self.arms[:2]]
        group: list[Worker] = []
        try:
            for place in range(len(self.arms)):
                if place + 2 < len(self.arms):
                    pending.append(self._start(self.arms[place + 2]))  # It imports while others compile.
                worker = pending.pop(0)
                if time.monotonic() > self.deadline:
                    self._fail(worker, "left out: no time")
                elif self._try(worker, lambda worker=worker: worker.found.update(_compile(worker))):
                    if group and sum(map(_bytes, [*group, worker])) > self.memory:
                        for other in pending:  # Their imports would be in the way.
                            other.wait_until_ready()
                        group = self._time(group)
                    group.append(worker)
            self._time(group, is_last=True)
        finally:
            for worker in [*pending, *group]:
                worker.close()

    def _start(self, arm: str) -> Worker:
        log = self.logs / f"{arm.replace(' ', '_').replace(',', '')}.log"
        return Worker(arm, self.settings, log, self.arm_seconds * (3 if arm == REFERENCE else 1))

    def _time(self, group: list[Worker], is_last: bool = False) -> list[Worker]:
        """Times some arms in turn, and returns those that go on: the reference."""
        warm_up = lambda worker: worker.found.update(_warm_up(worker, self.protocol.warm_up))
        group = [worker for worker in group if self._try(worker, lambda worker=worker: warm_up(worker))]
        for worker in group:
            worker.milliseconds = []
        for _ in range(self.protocol.blocks):
            group = [
                worker
                for worker in group
                if self._try(worker, lambda worker=worker: _block(worker, self.protocol.steps))
            ]
        self.clocks += [now] if (now := clocks()) else []
        if not group:
            return []
        # Without the reference what follows can still be compared, with another one.
        reference = next((worker for worker in group if worker.arm == self.reference), group[0])
        self.reference = reference.arm
        for worker in group:
            timing = _timing(worker.milliseconds, reference)
            worker.found = timing | worker.found if worker is reference else worker.found | timing
        staying = [] if is_last else [reference]
        for worker in group:
            if worker not in staying and self._try(worker, lambda worker=worker: _finish(worker)):
                self._keep(worker, f"{worker.found['ms']:10.2f} ms")
        return staying

    def _try(self, worker: Worker, act: Any) -> bool:
        try:
            act()
        except ArmFailed as error:
            self._fail(worker, str(error))
            return False
        return True

    def _fail(self, worker: Worker, error: str) -> None:
        worker.found["error"] = error
        self._keep(worker, error.splitlines()[0][:160])

    def _keep(self, worker: Worker, said: str) -> None:
        print(f"{worker.arm:36}{said}", flush=True)
        self.results[worker.arm] = worker.found
        self.save()
        worker.close()


def _compile(worker: Worker) -> dict[str, Any]:
    facts = worker.ask("compile")
    if HAS_GPU and facts["device"] == "cpu":
        raise ArmFailed("it runs on the CPU, beside a GPU")
    return facts | {"peak_bytes": worker.ask("peak")["peak_bytes"]}


def _bytes(worker: Worker) -> float:
    """What an arm may take: JAX doubles what it has each time that it needs more, and gives nothing back."""
    return 2.0 * (worker.found["program_bytes"] or 0) + 2**30


def _warm_up(worker: Worker, steps: int) -> dict[str, Any]:
    first = worker.ask("steps", count=1)["loss"]
    if steps > 1:
        worker.ask("steps", count=steps - 1)
    return {} if "loss_first" in worker.found else {"loss_first": _number(first)}


def _block(worker: Worker, steps: int) -> None:
    answer = worker.ask("steps", count=steps)
    worker.milliseconds.append(1000 * answer["seconds"] / steps)
    worker.found["loss_last"] = _number(answer["loss"])


def _number(loss: float) -> float | None:
    """JSON has no NaN and no inf."""
    return loss if math.isfinite(loss) else None


def _timing(milliseconds: list[float], reference: Worker) -> dict[str, Any]:
    """Returns median and quartiles of a step, and the ratio to the reference of each block."""
    low, median, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return {
        "ms": median,
        "ms_quartiles": [low, high],
        "ms_blocks": milliseconds,
        "reference": reference.arm,
        "times_reference": [ours / its for ours, its in zip(milliseconds, reference.milliseconds)],
    }


def _finish(worker: Worker) -> None:
    """Asks for the memory, holds the arm to its falling loss and forces an overflow."""
    found = worker.found
    compiling, found["peak_bytes"] = found["peak_bytes"], worker.ask("peak")["peak_bytes"]
    if found["peak_bytes"] and found["peak_bytes"] == compiling:
        found["peak_bytes"] = found["program_bytes"]  # What XLA tried out took more than the steps.
    first, last = found["loss_first"], found["loss_last"]
    if first is None or last is None or not last < first:
        raise ArmFailed(f"the loss did not fall: {first} to {last}")
    answer = worker.ask("overflow", scale=OVERFLOWING, limit=60)
    if (scales := answer["scales"]) is not None:
        found["overflow"] = {"skipped_steps": len(scales) - 2, "scale_after": scales[-1]}
        if not (scales[1] < scales[0] and scales[-1] >= scales[-2] and math.isfinite(answer["loss"])):
            raise ArmFailed(f"did not recover from an overflow: scales {scales}, loss {answer['loss']}")


def arms_of(workload: Workload) -> list[str]:
    """Returns the arms of a family in the order in which they are wanted."""
    from benchmarks.jax_arms import arms_of

    ours = arms_of(workload)
    if not HAS_GPU:  # cuDNN is for GPUs.
        ours = {name: precision for name, precision in ours.items() if not precision.cudnn}
    if importlib.util.find_spec("jmp") is None:
        ours = {name: precision for name, precision in ours.items() if precision.scaler != "jmp 0.0.4"}
    has_attention = hasattr(workload.model, "attention")
    torch = (*TORCH_ARMS, *(FLASH_ARMS if has_attention and HAS_GPU else ()))
    names = [*ours, *(torch if importlib.util.find_spec("torch") else ())]
    return sorted(names, key=lambda name: WANTED.index(name) if name in WANTED else len(WANTED))


def model_flops(workload: Workload, batch_size: int) -> int:
    """Returns the FLOPs of a training step, as `training_flops` counts them."""
    inputs, targets = workload.batch(0, batch_size)

    def loss(variables: Any) -> jax.Array:
        outputs, _ = workload.model.apply(variables, *inputs, mutable=["batch_stats"])
        return workload.loss(outputs, targets)

    return training_flops(loss, jax.eval_shape(workload.init, 0))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs one family and writes what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--quick", action="store_true", help="the small size, few steps")
    parser.add_argument("--arms", nargs="*", help="some arms only; all are shown by --list")
    parser.add_argument("--list", action="store_true", help="name the arms and end")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--add", action="store_true", help="keep what the file says of other arms")
    parser.add_argument("--minutes", type=float, default=6.5, help="after which no arm is compiled")
    parser.add_argument("--arm-seconds", type=float, default=180.0, help="for an arm to answer")
    parser.add_argument("--results", type=pathlib.Path, help="a folder; of --quick, out/quick")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # The GPU is for the workers.

    workload = getattr(FAMILIES[options.family], "small" if options.quick else "full")()
    arms = options.arms or arms_of(workload)
    if options.list:
        print("\n".join(arms))
        return {}
    if not (HAS_GPU or options.quick):
        parser.error("the full size needs a GPU; --quick runs anywhere")
    batch_size = options.batch_size or workload.batch_size
    size = "small" if options.quick else "full"
    protocol = Protocol(2, 3, 3) if options.quick else Protocol()
    began = time.monotonic()
    session = Session(
        arms=[arm for arm in arms if arm == REFERENCE] + [arm for arm in arms if arm != REFERENCE],
        settings={"family": options.family, "size": size, "batch_size": batch_size},
        protocol=protocol,
        memory=0.85 * memory_bytes(),
        deadline=began + 60 * options.minutes,
        arm_seconds=options.arm_seconds,
        logs=pathlib.Path("out/logs") / options.family,
    )
    found = {
        "family": options.family,
        "size": size,
        "batch_size": batch_size,
        "flops_a_step": model_flops(workload, batch_size),
        "device": device_name(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "protocol": dataclasses.asdict(protocol),
    }
    folder = options.results or pathlib.Path("out/quick" if options.quick else "benchmarks/results")
    path = folder / found["device"] / f"{options.family}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text())["arms"] if options.add and path.exists() else {}

    def save() -> None:
        """Writes what there is: whoever started this may end it when time is up."""
        found["arms"] = kept | {arm: session.results[arm] for arm in arms if arm in session.results}
        found["clocks"] = session.clocks
        found["seconds"] = round(time.monotonic() - began, 1)
        path.write_text(json.dumps(found, indent=1) + "\n")

    session.save = save
    session.run()
    print(f"{found['seconds']:.0f} s; written to {path}")
    return found


if __name__ == "__main__":
    main()
