"""Everything that an hour on a GPU can answer, in one command that goes on where it stopped.

    python -m benchmarks.gpu --minutes 9.5 --out DIR                  # On a GPU.
    python -m benchmarks.gpu --minutes 9.5 --out DIR --from EARLIER   # Goes on with the files of EARLIER.
    python -m benchmarks.gpu --pretend --minutes 9.5 --out DIR        # Anywhere, at a small size.
    python -m benchmarks.gpu --list                                   # The pieces, in order.
    python -m benchmarks.gpu --unpack DIR                             # The results into benchmarks/results.

It runs a queue of pieces (`benchmarks.gpu.pieces`). DIR gets few files: the results as one JSON file, caches
of compiled programs, and the logs. If DIR has such files already, the command goes on with them. The exit
status is 0 if the machine works, also if pieces failed: the summary names them and says why.
"""

import argparse
import datetime
import fnmatch
import os
import pathlib
import shutil
import sys
import time
from typing import Any

from benchmarks.command import read_json, write_json
from benchmarks.device import HAS_GPU, device_name, versions
from benchmarks.gpu import files
from benchmarks.gpu.pieces import SLOTS, make_pieces
from benchmarks.gpu.programs import table
from benchmarks.gpu.queue import Piece, Queue

RESULTS = "gpu-results-{}.json"
TABLES = pathlib.Path("benchmarks/results")  # From here the commands of the tables read.
# For a pretended GPU. The programs of a CPU are compiled only to be run a few times.
FAST_COMPILER = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def main(arguments: list[str] | None = None) -> int:
    """Runs the queue, and returns the exit status."""
    began = time.monotonic()
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.unpack is not None:
        return unpack(options.unpack, options.results)
    pieces = [piece for piece in make_pieces(options.pretend) if selected(piece, options.only)]
    if options.list:
        for piece in pieces:
            print(f"{piece.seconds:5.0f} s  {'' if piece.alone else 'beside  '}{piece.name}")
        return 0
    if options.out is None:
        parser.error("--out names the folder of the results")
    if not (HAS_GPU or options.pretend):
        parser.error("there is no NVIDIA GPU; --pretend runs every piece at a small size on the CPU")
    return run(pieces, options, began)


def selected(piece: Piece, patterns: list[str] | None) -> bool:
    """Returns whether a piece is asked for: all are, or one of the patterns matches its name."""
    return piece.gate or not patterns or any(fnmatch.fnmatch(piece.name, each) for each in patterns)


def run(pieces: list[Piece], options: argparse.Namespace, began: float) -> int:
    """Takes up the files of an earlier call, runs the queue and says what became of it."""
    out, work = options.out, options.work or options.out.parent / f"{options.out.name}-work"
    earlier = options.earlier or out
    out.mkdir(parents=True, exist_ok=True)
    name = RESULTS.format(f"{device_name()}-pretended" if options.pretend else device_name())
    found = read_json(earlier / name) or {"calls": [], "pieces": {}, "files": {}}
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    files.restore(work, found["files"])
    count = files.unpack_caches(earlier, work / "cache")
    found["calls"].append(
        {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "minutes": options.minutes,
            "device": device_name(),
            "versions": versions(),
            "seconds": 0.0,
        }
    )
    print(f"{count} files from caches; {_done(found)} pieces were done before", flush=True)

    def save(ended: bool) -> None:
        found["calls"][-1]["seconds"] = round(time.monotonic() - began, 1)
        if ended:  # Then no piece is being timed.
            found["calls"][-1]["caches"] = files.pack_caches(work / "cache", out)
            files.pack_logs(work / "logs", out)
        write_json(out / name, found)

    queue = Queue(
        pieces=pieces,
        work=work.absolute(),
        deadline=began + 60 * options.minutes,
        environment=environment(work.absolute() / "cache"),
        slots=SLOTS,
        records=found["pieces"],
        files=found["files"],
        save=save,
        say=lambda line: print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True),
    )
    queue.run()
    save(True)
    print(summary(pieces, found), flush=True)
    return 1 if found["pieces"].get("machine", {}).get("status") == "failed" else 0


def environment(cache: pathlib.Path) -> dict[str, str]:
    """Returns the environment of the pieces: where caches are, and no memory that is taken in advance."""
    folders = {
        "JAX_COMPILATION_CACHE_DIR": cache / "jax",
        "TORCHINDUCTOR_CACHE_DIR": cache / "inductor",
        "TRITON_CACHE_DIR": cache / "triton",
    }
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    (cache / "jax" / files.FIRST).mkdir(exist_ok=True)
    found = {**os.environ, **{name: str(folder) for name, folder in folders.items()}}
    found |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    if HAS_GPU:
        return found
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILER}".strip()
    return found | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def _done(found: dict[str, Any]) -> int:
    return sum(record.get("status") == "done" for record in found["pieces"].values())


def summary(pieces: list[Piece], found: dict[str, Any]) -> str:
    """Returns what became of the pieces: how many are done, and the others by name."""
    lines = [f"{_done(found)} of {len(pieces)} pieces are done; {found['calls'][-1]['seconds']:.0f} s"]
    for piece in pieces:
        record = found["pieces"].get(piece.name, {})
        if record.get("status") != "done":
            lines.append(
                f"  {piece.name}: {record.get('status', 'waiting')}. {record.get('why') or ''}".rstrip()
            )
    return "\n".join(lines)


def unpack(folder: pathlib.Path, results: pathlib.Path) -> int:
    """Writes the results of a folder into `results`, from where the commands of the tables read them.

    `results/DEVICE/FAMILY.json` stay so; all else goes to `results/DEVICE/gpu/`.
    """
    paths = sorted(folder.glob(RESULTS.format("*")))
    if not paths:
        print(f"{folder} has no {RESULTS.format('*')}", file=sys.stderr)
        return 1
    for path in paths:
        found = read_json(path)
        device = path.stem.removeprefix(RESULTS.format("").removesuffix(".json"))
        if device.endswith("-pretended") and results == TABLES:
            print(f"{path} is of a pretended GPU, and not for the tables: name --results", file=sys.stderr)
            return 1
        other = files.inside(results, device) / "gpu"
        tables = {name.removeprefix("results/") for name in found["files"] if name.startswith("results/")}
        rest = {name: content for name, content in found["files"].items() if not name.startswith("results/")}
        files.restore(results, {name: found["files"][f"results/{name}"] for name in tables})
        files.restore(other, rest)
        short = {
            name: {k: v for k, v in each.items() if k != "tail"} for name, each in found["pieces"].items()
        }
        write_json(other / "pieces.json", {"calls": found["calls"], "pieces": short})
        print(table(found["files"]))
        print(f"{len(found['files'])} files of {path} are in {results}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="the command ends within this time")
    parser.add_argument("--out", type=pathlib.Path, help="the folder of the results")
    parser.add_argument("--from", dest="earlier", type=pathlib.Path, help="the --out of an earlier call")
    parser.add_argument("--work", type=pathlib.Path, help="a folder for the work, which is emptied: OUT-work")
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="only pieces whose names match, such as 'time *'"
    )
    parser.add_argument("--pretend", action="store_true", help="small sizes, also without a GPU")
    parser.add_argument("--list", action="store_true", help="print the pieces and end")
    parser.add_argument(
        "--unpack", type=pathlib.Path, metavar="DIR", help="write the results of DIR to --results"
    )
    parser.add_argument("--results", type=pathlib.Path, default=TABLES)
    return parser


if __name__ == "__main__":
    sys.exit(main())
