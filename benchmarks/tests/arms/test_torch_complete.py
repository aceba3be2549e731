"""`examples/complete_linen.py` and `complete_nnx.py` have the numbers of PyTorch after every micro-batch.

Both begin with the same parameters and read the same micro-batches, in float32 and without dropout. Two
micro-batches hold an inf. The program in PyTorch is written out below: accumulation of the finite
micro-batches, clip, schedule, AdamW, a moving average, and batch statistics that wait.
"""

import copy
import importlib.util
import math

import jax
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from examples import complete_linen, complete_nnx
from tests.test_complete import Start, parts_of

if importlib.util.find_spec("torch") is None:
    pytest.skip('needs pip install -e ".[torch]"', allow_module_level=True)

import torch

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, BAD, PERIOD, ACCUMULATE = 65, (4, 11), 6, 3
UPDATES = (STEPS - len(BAD)) // ACCUMULATE
RATE, CLIP, DECAY = 1e-3, 0.5, 0.9
EPSILON = float(np.finfo(np.float32).eps)


def micro_batches():
    """The first micro-batches of the example. Two hold an inf."""
    train_x, _, train_y, _ = complete_linen.load_data()
    options = complete_linen.parse(["--batch-size", "16"])
    for step, (x, y) in zip(range(STEPS), complete_linen.batches(train_x, train_y, options, epoch=0, skip=0)):
        x[0, 0, 0, 0] = np.inf if step in BAD else x[0, 0, 0, 0]
        yield x, y


def run_example(program, monkeypatch):
    """The first parameters, and the state and the loss after each micro-batch."""
    monkeypatch.setitem(program.LOSS_SCALES, "float32", jmp.DynamicLossScale(2.0**10, period=PERIOD))
    settings = ["--precision", "float32", "--dropout", "0", "--accumulate", str(ACCUMULATE)]
    settings += ["--clip-norm", str(CLIP), "--ema-decay", str(DECAY), "--learning-rate", str(RATE)]
    start = Start(program, *settings)
    start.schedule = program.make_schedule(start.options, UPDATES)
    state = start.state()
    first = jax.device_get(parts_of(state)["params"])
    return first, start.run(state, micro_batches())


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 32, 3, padding="same", bias=False)
        self.norm1 = torch.nn.BatchNorm2d(32, momentum=0.1)  # The share of the new value: 1 - 0.9.
        self.conv2 = torch.nn.Conv2d(32, 64, 3, padding="same", bias=False)
        self.norm2 = torch.nn.BatchNorm2d(64, momentum=0.1)
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x):
        x = torch.nn.functional.avg_pool2d(self.norm1(self.conv1(x)).relu(), 2)
        return self.head(self.norm2(self.conv2(x)).relu().mean((2, 3)))


def as_torch(params):
    """Parameters of Flax under the names and in the layout of the network above."""
    names = {"kernel": "weight", "scale": "weight", "bias": "bias"}
    axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}
    return {
        f"{layer}.{names[name]}": np.transpose(value, axes[value.ndim])
        for layer, leaves in params.items()
        for name, value in leaves.items()
    }


def learning_rate(update):
    """Ten percent of the updates warm up. Then the rate follows a cosine to zero."""
    warmup = UPDATES // 10
    if update < warmup:
        return 0.1 + 0.9 * update / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - warmup) / (UPDATES - warmup))))


def copies(named):
    return {name: value.detach().numpy().copy() for name, value in named}


def run_torch(first, fault=None):
    """What the program has after each micro-batch. A `fault` is a program that people write by mistake."""
    model = Network()
    model.load_state_dict(
        {name: torch.tensor(value) for name, value in as_torch(first).items()}, strict=False
    )
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    average_fn = torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average_fn)
    ema.update_parameters(model)  # The average begins with the first parameters.
    scale, finite_in_a_row, waiting, updates = 2.0**10, 0, [], 0
    for x, y in micro_batches():
        before = copy.deepcopy(model.state_dict())
        logits = model(torch.tensor(x).permute(0, 3, 1, 2))
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(y, dtype=torch.long))
        optimizer.zero_grad()
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            if fault == "a clip of each micro-batch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            waiting.append([parameter.grad.clone() for parameter in model.parameters()])
            finite_in_a_row += 1
            if finite_in_a_row == PERIOD:
                scale, finite_in_a_row = 2 * scale, 0
        else:
            model.load_state_dict(before)
            scale, finite_in_a_row = scale / 2, 0
            if fault == "a skipped micro-batch counts as zero":
                waiting.append([torch.zeros_like(parameter) for parameter in model.parameters()])
        if len(waiting) == ACCUMULATE:
            for parameter, *grads in zip(model.parameters(), *waiting):
                parameter.grad = sum(grads) / ACCUMULATE
            if fault != "a clip of each micro-batch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            waiting, updates = [], updates + 1
            ema.update_parameters(model)
        elif fault == "the average moves on each micro-batch":
            ema.update_parameters(model)
        elif fault == "the schedule counts micro-batches" and updates:
            scheduler.step()
        buffers = copies(pair for pair in model.named_buffers() if "running" in pair[0])
        averages = copies(ema.module.named_parameters())
        yield loss.item(), scale, updates, copies(model.named_parameters()), averages, buffers


def assert_close(ours, theirs, first):
    """Float32 rounding. Adam makes a step of full size also of a gradient that is all rounding.

    So half of the numbers agree but for their last bits, and the distance is a small share of the whole way.
    """
    flat = lambda tree: np.concatenate([tree[name].ravel() for name in theirs])
    ours, theirs, first = flat(ours), flat(theirs), flat(first)
    difference = np.abs(ours - theirs)
    assert np.median(difference) < 100 * EPSILON
    assert np.linalg.norm(difference) <= 1e-2 * np.linalg.norm(theirs - first)


def as_flax(buffers, seen):
    """Statistics of PyTorch as Flax keeps them, after `seen` micro-batches.

    PyTorch keeps the variance of a sample, n / (n - 1) times the variance of the batch, which Flax keeps.
    """
    kept = 0.9**seen  # The share of the first variance, 1.
    for norm, numbers in (("norm1", 16 * 8 * 8), ("norm2", 16 * 4 * 4)):
        mean, variance = (buffers[f"{norm}.running_{name}"] for name in ("mean", "var"))
        yield norm, {"mean": mean, "var": kept + (variance - kept) * (numbers - 1) / numbers}


def compare(example, pytorch):
    first, history = example
    for step, ((state, loss), theirs) in enumerate(zip(history, pytorch, strict=True)):
        their_loss, scale, updates, parameters, averages, buffers = theirs
        assert math.isnan(their_loss) == (step in BAD)
        if step not in BAD:
            assert float(loss) == pytest.approx(their_loss, rel=1e-4)
        assert float(jmp.get_loss_scale(state["opt_state"]).loss_scale) == scale
        assert int(optax.tree.get(state["opt_state"], "gradient_step")) == updates
        assert_close(as_torch(state["params"]), parameters, as_torch(first))
        assert_close(as_torch(state["ema"]), averages, as_torch(first))
        seen = step + 1 - sum(bad <= step for bad in BAD)
        for norm, statistics in as_flax(buffers, seen):
            start = {"mean": np.zeros_like(statistics["mean"]), "var": np.ones_like(statistics["var"])}
            assert_close(state["batch_stats"][norm], statistics, start)


@pytest.fixture(scope="module")
def linen():
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run_example(complete_linen, monkeypatch)


@pytest.mark.parametrize("program", [complete_linen, complete_nnx], ids=["linen", "nnx"])
def test_each_micro_batch_has_the_numbers_of_pytorch(program, linen, one_thread, monkeypatch):
    example = linen if program is complete_linen else run_example(program, monkeypatch)
    compare(example, run_torch(example[0]))
    state = example[1][-1][0]
    assert int(optax.tree.get(state["opt_state"], "gradient_step")) == UPDATES == 21
    assert int(jmp.get_metrics(state["opt_state"])["skipped_steps"]) == len(BAD)


@pytest.mark.parametrize(
    "fault",
    [
        "a clip of each micro-batch",
        "a skipped micro-batch counts as zero",
        "the average moves on each micro-batch",
        "the schedule counts micro-batches",
    ],
)
def test_the_comparison_sees_a_program_with_a_fault(linen, one_thread, fault):
    with pytest.raises(AssertionError):
        compare(linen, run_torch(linen[0], fault))
