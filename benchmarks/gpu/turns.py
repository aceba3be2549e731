"""Times several steps in one process: a block of steps of one arm, a block of steps of the next."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def take_turns(arms: Mapping[str, Callable[[], Any]], steps: int, blocks: int) -> dict[str, list[float]]:
    """Returns the milliseconds of a step of each arm, once for each block. A block before them warms up.

    Args:
        arms: functions that start a step, and return arrays to wait for.
        steps: the number of steps in a block. The last one is waited for.
        blocks: the number of measured blocks of each arm. A ratio compares two blocks of one turn.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(blocks + 1):
        for name, step in arms.items():
            began = time.perf_counter()
            for _ in range(steps):
                last = step()
            jax.block_until_ready(last)  # type: ignore[possibly-unbound]
            if turn:
                milliseconds[name].append(1000 * (time.perf_counter() - began) / steps)
    return milliseconds
