"""The files that travel between two machines: results as one JSON file, caches as a few tar files.

A rented machine is bare each time. Its files come back only if they are few and small: at most 8 files,
16 MiB each, 64 MiB together.
"""

import io
import json
import os
import pathlib
import tarfile
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.command import to_json, write_atomically

MIB = 2**20
CACHE_FILES, CACHE_BYTES = 3, 15 * MIB  # How many tar files of caches there are, and the size of each.
FIRST = "xla_gpu_per_fusion_autotune_cache_dir"  # XLA's autotuning results are small: they travel first.


def collect(work: pathlib.Path, patterns: Iterable[str], known: dict[str, Any]) -> bool:
    """Reads the JSON and text files that a piece writes into `known`, by their path inside `work`.

    A file that another process is writing at this moment may be no JSON yet. Then the last one is kept.

    Returns:
        Whether anything has changed.
    """
    changed = False
    for pattern in patterns:
        for path in sorted(work.glob(pattern)):
            try:
                text = path.read_text()
                content = json.loads(text) if path.suffix == ".json" else text[-200_000:]
            except (json.JSONDecodeError, FileNotFoundError, UnicodeDecodeError):
                continue
            name = path.relative_to(work).as_posix()
            if known.get(name) != content:
                known[name], changed = content, True
    return changed


def restore(work: pathlib.Path, known: dict[str, Any]) -> None:
    """Writes the files that `collect` has read, so that pieces can add to them.

    The names come from another machine. If one leads out of `work`, nothing is written and the command ends.
    """
    paths = {name: inside(work, name) for name in known}
    for name, content in known.items():
        text = to_json(content) if name.endswith(".json") else content
        write_atomically(paths[name], text)


def inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a file in a folder; ends the command if its name leads out of it."""
    path = folder / name
    root, resolved = folder.resolve(), path.resolve()
    if resolved == root or not resolved.is_relative_to(root):
        raise SystemExit(
            f"The results hold a file named {name!r}, which is not inside of {folder}. Nothing of it is "
            "written: do not trust the machine that these results come from."
        )
    return path


def pack_caches(cache: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Packs the files of caches, oldest first, into `cache-0.tar`, `cache-1.tar`, ... of `folder`.

    The oldest programs belong to the first pieces, which are the most valuable ones.

    Returns:
        The numbers of files and bytes that are packed, and that had no place.
    """
    bins: list[list[pathlib.Path]] = [[] for _ in range(CACHE_FILES)]
    sizes = [0] * CACHE_FILES
    found: dict[str, Any] = {"packed": 0, "packed_bytes": 0, "left_out": 0, "left_out_bytes": 0}
    for path, size in _files(cache):
        needed = size + 2048  # A header, and padding to 512 bytes.
        place = next((i for i, used in enumerate(sizes) if used + needed <= CACHE_BYTES - MIB), None)
        word = "left_out" if place is None else "packed"
        found[word] += 1
        found[f"{word}_bytes"] += size
        if place is not None:
            bins[place].append(path)
            sizes[place] += needed
    for index, paths in enumerate(bins):
        target = folder / f"cache-{index}.tar"
        if not paths:
            continue
        new = folder / f".cache-{index}.tar.new"
        with tarfile.open(new, "w") as tar:
            for path in paths:
                tar.add(path, path.relative_to(cache).as_posix(), recursive=False)
        os.replace(new, target)
    return found


def _files(cache: pathlib.Path) -> Iterator[tuple[pathlib.Path, int]]:
    """Yields each file of a cache and its size: autotuning results first, then the oldest first."""
    files = [path for path in cache.rglob("*") if path.is_file() and not path.name.startswith(".")]
    stats = [(FIRST not in path.parts, path.stat().st_mtime, path, path.stat().st_size) for path in files]
    for _, _, path, size in sorted(stats, key=lambda each: each[:3]):
        yield path, size


def unpack_caches(folder: pathlib.Path, cache: pathlib.Path) -> int:
    """Unpacks what `pack_caches` has packed, and returns the number of files. It leaves out a broken tar."""
    count = 0
    for path in sorted(folder.glob("cache-*.tar")):
        try:
            with tarfile.open(path) as tar:
                tar.extractall(cache, filter="data")
                count += len(tar.getmembers())
        except tarfile.TarError as error:
            print(f"{path} is not used: {error}")
    return count


def pack_logs(logs: pathlib.Path, folder: pathlib.Path) -> None:
    """Packs the logs of all pieces into `logs.tar.gz`: the last megabyte of each."""
    new = folder / ".logs.tar.gz.new"
    with tarfile.open(new, "w:gz", compresslevel=1) as tar:
        for path in sorted(logs.rglob("*.log")):
            text = path.read_bytes()[-MIB:]
            info = tarfile.TarInfo(path.relative_to(logs).as_posix())
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    os.replace(new, folder / "logs.tar.gz")
