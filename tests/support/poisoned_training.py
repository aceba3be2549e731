"""examples/data_parallel.py on a small model, with an inf in the data of one process, and with its own end.

    python tests/support/poisoned_training.py RESULTS [--die-at STEP] [--variants] bytes ...

The batch of step 3 has an inf in its last row, which only the last device reads. Other processes than the
last one do not see it. With `--die-at` process 1 is killed by SIGKILL as soon as it has begun to save that
step. With `--variants` it also trains with whole parameters on each device, for four steps, and again with
sums in float32. RESULTS is a folder; each process writes a file there: what it holds at the end of each run.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import orbax.checkpoint as ocp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # As if the example were the script.

import data_parallel
from models import FAMILIES, Family, data, resnet
from models.workload import Optimizer, Workload

POISONED_STEP = 3


class Network(nn.Module):
    """64 bytes of text, as numbers from 0 to 1, to the logits of the next byte."""

    @nn.compact
    def __call__(self, text):
        return nn.Dense(256)(nn.relu(nn.Dense(64)(text)))


def make_batch(rng, size):
    text = data.source_text()
    starts = rng.integers(0, len(text) - 65, size)
    chosen = text[starts[:, None] + np.arange(64)].astype(np.float32) / 255
    poisoned = rng.bit_generator.seed_seq.entropy == POISONED_STEP
    if poisoned and jax.process_index() == jax.process_count() - 1:
        chosen[-1] = np.inf
    return (chosen,), text[starts + 64].astype(np.int32)


def die_after_saving(last_step):
    """Ends process 1 as `kill -9` does, when the save of a step has begun in the background."""
    save = ocp.CheckpointManager.save

    def save_and_die(self, step, **options):
        found = save(self, step, **options)
        if step == last_step and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    ocp.CheckpointManager.save = save_and_die


def summary(run):
    """The history of a run, and the SHA-256 of what lies on the first device of this process."""
    leaves = [leaf.addressable_data(0) for leaf in jax.tree.leaves((run.params, run.opt_state))]
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    return {"history": run.history, "digest": digest, "bytes": sum(leaf.nbytes for leaf in leaves)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--variants", action="store_true")
    own, rest = parser.parse_known_args()
    if own.die_at is not None:
        die_after_saving(own.die_at)
    workload = Workload(Network(), resnet.loss, Optimizer("adamw", 1e-3), 16, make_batch)
    FAMILIES["bytes"] = Family(lambda: workload, lambda: workload)
    found = {"as asked": summary(data_parallel.main(rest))}
    if own.variants:
        options = data_parallel.read_options(["bytes", "--steps", "4"])
        found["whole"] = summary(data_parallel.train(workload, options))
        options.reduce_dtype = "float32"
        found["float32"] = summary(data_parallel.train(workload, options))
    (own.results / f"{jax.process_index()}.json").write_text(json.dumps(found))
