"""Runs pieces of work until a deadline, each in a process of its own, and keeps every result as it comes.

A piece that is timed runs alone. A piece that compiles runs beside others, while nothing is timed. A piece
that failed goes to the end of the queue. A second call with the files of the first goes on where it stopped.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from benchmarks.gpu.files import collect

AHEAD = 2  # While the next piece that is timed compiles, the pieces until so many further ones compile too.
TRIES = 2  # How often a piece is tried in one call.
ENDING = 4.0  # Seconds before the deadline at which processes are ended: files must still be packed.
Record = dict[str, Any]

# Becomes the process of a piece. It first asks Linux to kill it when the queue dies: else a piece of a killed
# queue would go on using the GPU.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of work.

    Attributes:
        name: its name, which must stay the same from call to call.
        command: the arguments of Python. `{work}` stands for the folder of the work.
        seconds: how long it takes, about. It is not started if less time is left.
        limit: after so many seconds it is ended, and counts as failed.
        alone: whether nothing else may run meanwhile. Everything that is timed runs alone.
        lane: pieces of one lane that are not alone run one after the other, as many at once as `slots` says.
        needs: pieces that must have had their turn before.
        packages: what must be installed.
        writes: the files with its results, as patterns inside the folder of the work.
        gate: whether nothing else is run if it fails. It is run in every call.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    limit: float
    alone: bool = True
    lane: str = ""
    needs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    gate: bool = False


@dataclasses.dataclass
class _Running:
    piece: Piece
    process: subprocess.Popen[bytes]
    began: float
    ends: float
    ends_with: Literal["limit", "deadline"]
    log: pathlib.Path


@dataclasses.dataclass
class Queue:
    """The pieces of a call, and what became of them.

    Attributes:
        pieces: the most valuable first.
        work: a folder for logs and results.
        deadline: on the clock of `time.monotonic`.
        environment: of the processes.
        slots: how many pieces of a lane run at once.
        records: what became of each piece; those of earlier calls when it starts.
        files: the contents of the files that the pieces wrote, by path.
        save: called after each change of `records` or `files`, with whether a piece has ended.
        say: prints a line.
    """

    pieces: Sequence[Piece]
    work: pathlib.Path
    deadline: float
    environment: dict[str, str]
    slots: dict[str, int]
    records: dict[str, Record]
    files: dict[str, Any]
    save: Callable[[bool], None] = lambda _: None
    say: Callable[[str], None] = print
    poll: float = 0.5
    running: list[_Running] = dataclasses.field(default_factory=list)
    tried: dict[str, int] = dataclasses.field(default_factory=dict)

    def run(self) -> None:
        """Runs pieces until all had their turn or the time is over."""
        self._begin_again()
        try:
            while self._step():
                time.sleep(self.poll)
        finally:
            for each in self.running:
                _kill(each.process)

    # The pieces that are left.

    def pending(self) -> list[Piece]:
        """Returns the pieces that are left: those that failed least often first, then in their order."""
        running = {each.piece.name for each in self.running}
        left = [
            piece
            for piece in self.pieces
            if piece.name not in running
            and self._record(piece).get("status") not in ("done", "lacks")
            and self.tried.get(piece.name, 0) < TRIES
        ]
        return sorted(left, key=lambda piece: self._record(piece).get("failures", 0))

    def left(self) -> float:
        """Returns the seconds until processes are ended."""
        return self.deadline - ENDING - time.monotonic()

    def _record(self, piece: Piece) -> Record:
        return self.records.setdefault(piece.name, {})

    def _begin_again(self) -> None:
        """Marks the pieces that a kill of an earlier call ended, and the pieces whose package is missing."""
        for piece in self.pieces:
            if piece.gate:
                self.records.pop(piece.name, None)
            record = self._record(piece)
            if record.get("status") == "running":
                record["status"] = "interrupted"
                record["why"] = "its call was killed while it ran"
                record["interrupted"] = record.get("interrupted", 0) + 1
                if record["interrupted"] > 1:  # Perhaps it has brought the machine down.
                    record["failures"] = record.get("failures", 0) + 1
            lacking = [name for name in piece.packages if importlib.util.find_spec(name) is None]
            if lacking and record.get("status") != "done":
                record.update(status="lacks", why=f"not installed: {', '.join(lacking)}")
                self.say(f"{piece.name}: {record['why']}")
            elif record.get("status") == "lacks":
                record.update(status="waiting", why=None)
        self.save(False)

    def _step(self) -> bool:
        """Ends, starts and reads processes; returns whether there is more to do."""
        self._reap()
        self._read()
        if not any(each.piece.alone for each in self.running):
            self._start_what_fits()
        return bool(self.running)

    def _start_what_fits(self) -> None:
        waiting = [piece for piece in self.pending() if self._seconds(piece) <= self.left()]
        over = {name for name, record in self.records.items() if _had_its_turn(record)}
        alone = [index for index, piece in enumerate(waiting) if piece.alone]
        # What compiles far ahead would only delay the next piece that is timed.
        near = waiting[: alone[AHEAD]] if len(alone) > AHEAD else waiting
        beside = [piece for piece in near if not piece.alone]
        if alone:
            first = waiting[alone[0]]
            missing = [name for name in first.needs if name not in over and self._can_come(name, beside)]
            if not missing:
                if not self.running:
                    self._start(first)
                return  # It waits until what compiles is over.
        for piece in beside:
            used = sum(each.piece.lane == piece.lane for each in self.running)
            if used < self.slots.get(piece.lane, 1):
                self._start(piece)

    def _can_come(self, name: str, beside: list[Piece]) -> bool:
        """Returns whether a piece that another one needs runs, or can be started in the time that is left."""
        return any(piece.name == name for piece in beside) or any(
            each.piece.name == name for each in self.running
        )

    def _seconds(self, piece: Piece) -> float:
        return min(piece.seconds, self._record(piece).get("seconds") or piece.seconds)

    # Processes.

    def _start(self, piece: Piece) -> None:
        record = self._record(piece)
        self.tried[piece.name] = self.tried.get(piece.name, 0) + 1
        record.update(status="running", why=None, tries=record.get("tries", 0) + 1)
        self.save(False)
        log = self.work / "logs" / f"{piece.name.replace(' ', '_').replace(',', '')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-S",
            "-c",
            _LAUNCHER,
            str(os.getpid()),
            *(part.replace("{work}", str(self.work)) for part in piece.command),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                process_group=0,
            )
        began = time.monotonic()
        by_limit, by_deadline = began + piece.limit, self.deadline - ENDING
        ends_with = "limit" if by_limit < by_deadline else "deadline"
        self.running.append(_Running(piece, process, began, min(by_limit, by_deadline), ends_with, log))
        self.say(f"{piece.name} ...")

    def _reap(self) -> None:
        for each in list(self.running):
            status = each.process.poll()
            if status is None and time.monotonic() < each.ends:
                continue
            seconds = round(time.monotonic() - each.began, 1)
            _kill(each.process)  # Its own processes end too.
            self.running.remove(each)
            collect(self.work, each.piece.writes, self.files)
            self._over(each, status, seconds)

    def _over(self, each: _Running, status: int | None, seconds: float) -> None:
        piece, record = each.piece, self._record(each.piece)
        record["tail"] = each.log.read_bytes()[-3000:].decode(errors="replace")
        if status == 0:
            record.update(status="done", why=None, seconds=seconds)
        elif status is None and each.ends_with == "deadline":
            record.update(status="cut off", why=f"the time was over after {seconds:.0f} s of it")
            self.tried[piece.name] = TRIES
        else:
            last = [line for line in record["tail"].splitlines() if line.strip()][-1:]
            why = f"it took longer than {piece.limit:.0f} s" if status is None else f"exit status {status}"
            record.update(status="failed", why="; ".join([why, *last])[:500])
            record["failures"] = record.get("failures", 0) + 1
            if piece.gate:
                self.deadline = 0.0
        self.say(f"{piece.name}: {record['status']} after {seconds:.0f} s. {record['why'] or ''}")
        self.save(True)

    def _read(self) -> None:
        """Keeps what the running pieces have written so far."""
        patterns = [pattern for each in self.running for pattern in each.piece.writes]
        if patterns and collect(self.work, patterns, self.files):
            self.save(False)


def _had_its_turn(record: Record) -> bool:
    return record.get("status") in ("done", "lacks", "failed")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
