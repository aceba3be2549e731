"""How fast one model trains: every arm of JAX and of PyTorch, side by side on one GPU.

    python -m benchmarks.timed.run gpt2-small            # On a GPU, within ten minutes.
    python -m benchmarks.timed.run gpt2-small --quick    # Anywhere, at a small size: shows that it works.

Each arm is a process (`benchmarks.arms.worker`) with the same initial values and the same batch. The arms
compile one after another, so that nothing disturbs the kernels that XLA times. Then they take turns: a block
of steps of one arm, a block of steps of the next. As many arms are timed together as fit into the memory.
float16 is timed with each group, so two arms of different groups are compared by their ratios to float16.
`python -m benchmarks.timed.table` draws the results.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import pathlib
import time
from typing import Any

import jax

from benchmarks.command import make_parser, write_json
from benchmarks.device import HAS_GPU, device_name, memory_bytes, versions
from benchmarks.timed.flops import training_flops
from benchmarks.timed.session import REFERENCE, Protocol, Session
from examples.models import FAMILIES
from examples.models.workload import Workload

TORCH_ARMS = ("torch float32", "torch TF32", "torch bfloat16", "torch float16")
FLASH_ARMS = ("torch bfloat16, flash", "torch float16, flash")
# The arms of the targets come first, in case time runs out.
WANTED = (REFERENCE, "float32", "TF32", "torch float16", "float16 autocast", "bfloat16", "float16 unchecked")
WANTED += ("float16, cuDNN attention", "torch float16, flash", "torch TF32", "torch float32")


def arms_of(workload: Workload) -> list[str]:
    """Returns the arms of a family, the most important first."""
    from benchmarks.arms.jax_arms import arms_of

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


def missing(arms: list[str], kept: dict[str, Any]) -> list[str]:
    """Returns the arms that were not measured yet, and the reference with which they are compared."""
    lacking = [arm for arm in arms if "error" in kept.get(arm, {"error": ""})]
    return [arm for arm in arms if arm in lacking or (lacking and arm == REFERENCE)]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs one family and writes the results."""
    parser = _parser()
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # The workers use the GPU.
    size = "small" if options.quick else "full"
    workload = getattr(FAMILIES[options.family], size)()
    arms = options.arms or arms_of(workload)
    if options.list:
        print("\n".join(arms))
        return {}
    if not (HAS_GPU or options.quick):
        parser.error("the full size needs a GPU; --quick runs anywhere")

    folder = options.results or pathlib.Path("out/quick" if options.quick else "benchmarks/results")
    path = folder / device_name() / f"{options.family}.json"
    kept = json.loads(path.read_text())["arms"] if options.add and path.exists() else {}
    if options.missing:
        arms = missing(arms, kept)
        if not arms:
            print(f"all arms are in {path}")
            return {}
    began = time.monotonic()
    protocol = Protocol(2, 3, 3) if options.quick else Protocol()
    settings = {
        "family": options.family,
        "size": size,
        "batch_size": options.batch_size or workload.batch_size,
    }
    session = Session(
        arms=[arm for arm in arms if arm == REFERENCE] + [arm for arm in arms if arm != REFERENCE],
        settings=settings,
        protocol=protocol,
        memory=0.85 * memory_bytes(),
        deadline=began + 60 * options.minutes,
        arm_seconds=options.arm_seconds,
        logs=options.logs / options.family,
    )
    found: dict[str, Any] = {
        **settings,
        "flops_a_step": model_flops(workload, settings["batch_size"]),
        "device": device_name(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "protocol": dataclasses.asdict(protocol),
    }
    path.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        """Writes the results so far, since the run may be ended early."""
        found["arms"] = kept | {arm: session.results[arm] for arm in arms if arm in session.results}
        found["clocks"] = session.clocks
        found["seconds"] = round(time.monotonic() - began, 1)
        write_json(path, found)

    session.save = save
    session.run()
    print(f"{found['seconds']:.0f} s; written to {path}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--quick", action="store_true", help="the small size, few steps")
    parser.add_argument("--arms", nargs="*", help="some arms only; --list shows all")
    parser.add_argument("--list", action="store_true", help="print the names of the arms and end")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--add", action="store_true", help="keep the results of other arms in the file")
    parser.add_argument("--missing", action="store_true", help="with --add, only arms that the file lacks")
    parser.add_argument("--minutes", type=float, default=6.5, help="no arm is compiled after this time")
    parser.add_argument("--arm-seconds", type=float, default=180.0, help="the time an arm has to answer")
    parser.add_argument("--results", type=pathlib.Path, help="a folder; with --quick out/quick")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("out/logs"), help="a folder")
    return parser


if __name__ == "__main__":
    main()
