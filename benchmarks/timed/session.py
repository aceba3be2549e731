"""A session compiles and times the arms of one model, which take turns."""

import dataclasses
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.arms.worker import ArmFailed, Worker
from benchmarks.device import HAS_GPU, clocks

REFERENCE = "float16"
AHEAD = max(2, len(os.sched_getaffinity(0)) // 2)  # How many arms import and trace while another compiles.
OVERFLOWING = 2.0**40  # At this scale every gradient overflows float16.


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How arms are timed: warm-up steps, then blocks of steps. Each block ends with one wait."""

    warm_up: int = 10
    blocks: int = 5
    steps: int = 20


@dataclasses.dataclass
class Session:
    """The arms of one family, compiled and timed.

    Attributes:
        arms: their names, the most important first. `REFERENCE` is timed with all others.
        settings: the settings of `benchmarks.arms.worker`.
        protocol: how they are timed.
        memory: the bytes that the arms of one group may take together.
        deadline: on the clock of `time.monotonic`. An arm that is not compiled by then is left out.
        arm_seconds: how long an arm may take to answer. The reference may take three times as long: without
            it there are no ratios.
        logs: the folder for the stderr of the processes.
        save: called after each new result.
        results: the figures of each arm.
        clocks: the clocks of the GPU while it worked, once for each group.
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
        """Compiles and times all arms. `results` gets the figures of each arm, or its `error`."""
        pending = [self._start(arm) for arm in self.arms[:AHEAD]]
        group: list[Worker] = []
        try:
            for index in range(len(self.arms)):
                if index + AHEAD < len(self.arms):
                    pending.append(self._start(self.arms[index + AHEAD]))
                worker = pending.pop(0)
                if time.monotonic() > self.deadline:
                    self._fail(worker, "left out: no time")
                elif self._try(worker, lambda worker=worker: worker.found.update(_compile(worker))):
                    if group and sum(map(_bytes, [*group, worker])) > self.memory:
                        for other in pending:  # Their work would disturb the timing.
                            other.wait_until_ready()
                        group = self._time(group)
                    group.append(worker)
            self._time(group, is_last=True)
        finally:
            for worker in [*pending, *group]:
                worker.close()

    def _start(self, arm: str) -> Worker:
        log = self.logs / f"{arm.replace(' ', '_').replace(',', '')}.log"
        worker = Worker(arm, self.settings, log, self.arm_seconds * (3 if arm == REFERENCE else 1))
        worker.begin("lower")
        return worker

    def _time(self, group: list[Worker], is_last: bool = False) -> list[Worker]:
        """Times a group of arms in turn, and returns the arms that stay: the reference."""
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
        # If the reference failed, another arm takes its place, so that the others can be compared.
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
    """Returns the memory that an arm may take: JAX doubles its memory when it needs more, and keeps it."""
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
    """Returns None for NaN and inf, which JSON does not have."""
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
    """Asks for the memory, checks that the loss fell, and forces an overflow."""
    found = worker.found
    compiling, found["peak_bytes"] = found["peak_bytes"], worker.ask("peak")["peak_bytes"]
    if found["peak_bytes"] and found["peak_bytes"] == compiling:
        found["peak_bytes"] = found["program_bytes"]  # XLA's tuning took more memory than the steps.
    first, last = found["loss_first"], found["loss_last"]
    if first is None or last is None or not last < first:
        raise ArmFailed(f"the loss did not fall: {first} to {last}")
    answer = worker.ask("overflow", scale=OVERFLOWING, limit=60)
    if (scales := answer["scales"]) is not None:
        found["overflow"] = {"skipped_steps": len(scales) - 2, "scale_after": scales[-1]}
        if not (scales[1] < scales[0] and scales[-1] >= scales[-2] and math.isfinite(answer["loss"])):
            raise ArmFailed(f"did not recover from an overflow: scales {scales}, loss {answer['loss']}")
