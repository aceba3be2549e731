r"""A worker: one arm in a process of its own. `benchmarks.timed.run` starts workers.

    python -m benchmarks.arms.worker \
        '{"family": "gpt2-small", "arm": "float16", "size": "full", "batch_size": 8}'

A command is a line of JSON on stdin, such as `{"do": "steps", "count": 20}`. The answer is a line of JSON on
stdout. It holds the results, or `error` and a message. Everything else is written to stderr.
"""

import contextlib
import json
import os
import pathlib
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jaxlib

from benchmarks.device import HAS_GPU

# The parent process.


class ArmFailed(Exception):
    """An arm answered with an error, died or took too long."""


class Worker:
    """An arm in a process of its own.

    Args:
        arm: the name of the arm.
        settings: what the command above is given, without the arm.
        log: the file for the stderr of the process.
        seconds: how long an answer may take.
    """

    def __init__(self, arm: str, settings: dict[str, Any], log: pathlib.Path, seconds: float):
        self.arm, self.seconds = arm, seconds
        self.found: dict[str, Any] = {}
        self.milliseconds: list[float] = []
        self.is_ready = False
        self.begun = 0
        self.failure: str | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        on_gpu = HAS_GPU and not arm.startswith("torch ")
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment["JAX_PLATFORMS"] = "cuda,cpu" if on_gpu else "cpu"
        if on_gpu and "JAX_COMPILATION_CACHE_DIR" not in environment:  # JAX keeps one in that folder.
            # The arms share a cache of the fastest kernels.
            cache = log.parent.absolute() / f"autotuned-{jaxlib.__version__}"
            cache.mkdir(exist_ok=True)
            flag = f"--xla_gpu_per_fusion_autotune_cache_dir={cache}"
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.arms.worker", json.dumps({**settings, "arm": arm})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                bufsize=0,  # A buffer would hide an answer from select.
            )

    def begin(self, do: str) -> None:
        """Sends a command and does not wait for it. `ask` raises its error, if it has one."""
        self.begun += 1
        with contextlib.suppress(BrokenPipeError):
            self._send({"do": do})

    def wait_until_ready(self) -> None:
        """Waits until everything is imported, and every command of `begin` is done."""
        waiting, self.begun = self.begun + (not self.is_ready), 0
        self.is_ready = True
        try:
            for _ in range(waiting):
                self._answer()
        except ArmFailed as error:
            self.failure = str(error)

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        """Sends a command and returns the answer.

        Raises:
            ArmFailed: there was no answer in time, or the answer is an error.
        """
        self.wait_until_ready()
        if self.failure is not None:
            raise ArmFailed(self.failure)
        try:
            self._send({"do": do, **command})
        except BrokenPipeError:
            raise ArmFailed(f"died before {do}") from None
        return self._answer()

    def _send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(command) + "\n").encode())

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], self.seconds)[0]:
            raise ArmFailed(f"no answer within {self.seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise ArmFailed(f"died with exit status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ArmFailed(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process, and so frees its memory."""
        self.process.kill()
        self.process.communicate()


# The worker process.


def make_arm(family: str, arm: str, size: str, batch_size: int) -> Any:
    """Returns a `JaxArm` or a `TorchArm`.

    Args:
        family: one of `examples.models.FAMILIES`.
        arm: the name of the arm.
        size: `full`, or `small` for a CPU.
        batch_size: how many examples a step takes.
    """
    from examples.models import FAMILIES

    workload = getattr(FAMILIES[family], size)()
    if arm.startswith("torch "):
        from benchmarks.arms.torch_arms import TorchArm

        return TorchArm(arm, workload, batch_size, quick=size == "small")
    from benchmarks.arms.jax_arms import JaxArm

    return JaxArm(arm, workload, batch_size)


def obey(arm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Runs one command and returns the answer."""
    match command:
        case {"do": "lower"}:  # PyTorch traces while it compiles.
            if hasattr(arm, "lower"):
                arm.lower()
            return {}
        case {"do": "compile"}:
            return arm.compile()
        case {"do": "steps", "count": count}:
            began = time.perf_counter()
            loss = arm.steps(count)
            return {"seconds": time.perf_counter() - began, "loss": loss}
        case {"do": "peak"}:
            return {"peak_bytes": arm.peak_bytes()}
        case {"do": "overflow", "scale": scale, "limit": limit}:
            scales = arm.overflow(scale, limit)
            return {"scales": scales, "loss": None if scales is None else arm.steps(1)}
    raise ValueError(f"unknown command {command}")


def attempt(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `act` returns, or its error."""
    try:
        return act()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def main() -> None:
    """Makes the arm, then runs the commands on stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print goes to stderr.
    tell = lambda found: answers.write(json.dumps(found) + "\n")
    made: list[Any] = []

    def make() -> dict[str, Any]:
        made.append(make_arm(**json.loads(sys.argv[1])))
        return {"ready": True}

    tell(attempt(make))
    for line in sys.stdin:
        tell(attempt(lambda line=line: obey(made[0], json.loads(line))))


if __name__ == "__main__":
    main()
