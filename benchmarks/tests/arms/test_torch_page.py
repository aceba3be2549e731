"""The programs of docs/migrating/torch.md, PyTorch's beside ours on the same batches, section by section."""

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip('needs pip install -e ".[torch]"', allow_module_level=True)

import torch

import jmp_lite as jmp

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = (Path(__file__).parents[3] / "docs/migrating/torch.md").read_text()
TWINS = (Path(__file__).parent / "torch_programs.md").read_text()  # PyTorch's, and short ones of ours.
TRAINING = ["One program", "Clip by value", "Accumulation", "Several losses and optimizers"]
TRAINING += ["Gradient penalty"]
SECTIONS = [*TRAINING, "Schedule, average and log", "Off", "A saved scaler", "Evaluation"]
SECTIONS += ["Custom autograd functions", "DDP"]


def blocks(section, language):
    text = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", f"{PAGE}\n{TWINS}", re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```$", "\n".join(text), re.DOTALL | re.MULTILINE)


def run_page(language):
    """What each section of the page leaves behind."""
    names, after = {}, {}
    for section in SECTIONS:
        # In "Accumulation" the second block of ours is another rule than PyTorch's.
        for block in blocks(section, language)[: 1 if section == "Accumulation" else None]:
            exec(compile(block, f"{section}, {language}", "exec"), names)
        after[section] = dict(names)
    return after


AVERAGED = """
(params, opt_state), train_step, average, scales = start(advances), make_step(advances), None, []
for x in batches:
    params, opt_state = train_step(params, opt_state, x)
    scales.append(float(jmp.get_loss_scale(opt_state).loss_scale))
    average = params if average is None else optax.incremental_update(params, average, 0.1)
"""


@pytest.fixture(scope="module")
def theirs(one_thread):
    return run_page("py")


@pytest.fixture(scope="module")
def ours():
    return run_page("python")


def weights(model):
    return model.weight.detach().numpy().T


def assert_close(ours, theirs):
    """As far as two sums of half precision products in other orders."""
    start = np.full((16, 4), 0.1, np.float32)
    moved = np.linalg.norm(theirs - start)
    assert moved > 0.05
    assert np.linalg.norm(np.asarray(ours) - theirs) < 2e-3 * moved


@pytest.mark.parametrize("section", TRAINING)
def test_scales_and_weights_of_a_program_are_those_of_pytorch(theirs, ours, section):
    theirs, ours = theirs[section], ours[section]
    assert ours["scales"] == theirs["scales"]
    assert len(set(ours["scales"])) > 1
    assert_close(ours["params"], weights(theirs["model"]))


def test_the_second_optimizer_goes_on_while_the_first_skips(theirs, ours):
    section = "Several losses and optimizers"
    assert_close(ours[section]["other_params"], weights(theirs[section]["other_model"]))


def test_schedule_average_and_skipped_steps_are_those_of_pytorch(theirs, ours):
    theirs, ours = theirs["Schedule, average and log"], dict(ours["Schedule, average and log"])
    exec(AVERAGED, ours)
    assert float(ours["schedule"](ours["counts"][1])) == pytest.approx(theirs["rate"])
    assert ours["jmp"].get_metrics(ours["opt_state"])["skipped_steps"] == theirs["skipped"] == 1
    assert ours["scales"] == theirs["scales"]
    assert_close(ours["params"], weights(theirs["model"]))
    assert_close(ours["average"], weights(theirs["average"].module))


def test_a_disabled_scaler_has_the_scale_one_and_no_check(theirs, ours):
    assert ours["Off"]["scales"] == theirs["Off"]["scales"] == [1.0] * 16
    assert np.isnan(weights(theirs["Off"]["model"])).any()
    assert np.isfinite(ours["Off"]["params"]).all()


def test_a_saved_scaler_goes_on_here_as_in_pytorch(ours):
    from_torch = ours["A saved scaler"]["from_torch"]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, growth_factor=4.0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    finite = np.r_[np.random.default_rng(0).random(60) < 0.8, np.zeros(20, bool)]  # Down to 2**-20 or so.
    scales, handed_over = [], []
    for flag in finite:
        scaler.scale(parameter.sum()).backward()
        handed_over.append(from_torch(scaler.state_dict()))
        parameter.grad.fill_(1.0 if flag else np.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[-1] < 1 < max(scales)
    for begin in (0, 1, 17, 59):
        state, found = handed_over[begin], []
        for flag in finite[begin:]:
            state = state.adjust(jnp.asarray(flag))
            found.append(float(state.loss_scale))
        assert found == scales[begin:]


def test_a_wrapped_model_computes_what_pytorch_computes(theirs, ours):
    theirs, ours = theirs["Evaluation"], ours["Evaluation"]
    np.testing.assert_allclose(ours["wrapped"], theirs["wrapped"].detach().float().numpy(), rtol=2e-3)


def test_pytorch_computes_custom_functions_in_half_and_with_cast_inputs_in_float32(theirs):
    assert theirs["Custom autograd functions"]["seen"] == [torch.float16] * 3
    seen = []

    class Exact(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            seen.append((x @ x).dtype)
            return x @ x

    with torch.autocast("cpu", torch.float16):
        Exact.apply(torch.ones(2, 2, dtype=torch.float16))
    assert seen == [torch.float32]


def test_both_rules_of_a_custom_vjp_run_in_half_here():
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, grad: (grad @ saved[1].T, saved[0].T @ grad))
    x, w = jnp.ones((8, 16)), jnp.ones((16, 4))

    def matmuls_in_half(loss_fn):
        report = jmp.explain(jax.grad(loss_fn, (0, 1)), jnp.float16)(x, w)
        return [each.in_half for each in report.operations if each.name == "dot_general"]

    assert matmuls_in_half(lambda x, w: jnp.sum(product(x, w) ** 2)) == [True] * 3
    in_float32 = jmp.full_precision(product)
    assert matmuls_in_half(lambda x, w: jnp.sum(in_float32(x, w) ** 2)) == [False] * 3


CHILD = """
import sys
import numpy as np
{blocks}
model, scales = train_in_process(int(sys.argv[1]), 2, sys.argv[2])
np.savez(sys.argv[3], weights=model.weight.detach().numpy().T, scales=scales)
"""


def test_two_processes_of_ddp_and_a_sharded_batch_train_alike(ours, tmp_path):
    setup = blocks("One program", "py")[0].partition("\nmodel, optimizer, scaler = start()")[0]
    program = CHILD.format(blocks=f"{setup}\n{blocks('DDP', 'py')[0]}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    saved = [tmp_path / f"{rank}.npz" for rank in range(2)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path / "store"), str(saved[rank])],
            env=environment,
        )
        for rank in range(2)
    ]
    assert [child.wait(timeout=300) for child in children] == [0, 0]
    found = [np.load(each) for each in saved]
    np.testing.assert_array_equal(found[0]["weights"], found[1]["weights"])
    for each in found:
        assert each["scales"].tolist() == ours["DDP"]["scales"]
        assert min(each["scales"]) < max(each["scales"])
    assert_close(ours["DDP"]["params"], found[0]["weights"])


def test_accelerate_skips_as_ours_and_its_schedule_waits():
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)  # Its optimizers read its state.
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
    schedule = accelerate.scheduler.AcceleratedScheduler(schedule, optimizer)
    rates = []
    for gradient in (1.0, np.inf, 1.0):
        scaler.scale(parameter.sum()).backward()
        parameter.grad.fill_(gradient)
        optimizer.step()
        assert optimizer.step_was_skipped == (gradient == np.inf)
        with warnings.catch_warnings(action="ignore"):  # Accelerate replaces the method that PyTorch watches.
            schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    assert rates == [0.5, 0.5, 0.25]


@pytest.mark.filterwarnings("ignore")
def test_lightning_clips_unscaled_gradients_and_its_schedule_advances(theirs):
    lightning = pytest.importorskip("lightning")
    page, norms, rates, scales = theirs["One program"], [], [], []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = page["start"]()[0]

        def training_step(self, batch, index):
            output = self.model(batch)
            assert output.dtype == torch.float16
            return (output.float() - 1).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            norms.append(float(self.model.weight.grad.norm()))

        def on_train_batch_end(self, *args):
            rates.append(self.lr_schedulers().get_last_lr()[0])
            scales.append(scaler.get_scale())

    batches = page["batches"][3:7]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, plugins=[plugin], **quiet
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.tensor(batches), batch_size=None))
    assert scales == [1024.0, 1024.0, 512.0, 512.0]
    assert rates == [0.05, 0.025, 0.0125, 0.00625]
    grad = jax.grad(page_loss)(jnp.full((16, 4), 0.1), batches[0])
    assert norms[0] == pytest.approx(float(jnp.linalg.norm(grad)), rel=1e-2)


def page_loss(params, x):
    return jnp.mean((x @ params - 1) ** 2)
