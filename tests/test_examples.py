"""The examples run, print what they say, and show what they claim."""

import importlib.util
import math
import re
import runpy
import struct
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

import jmp_lite as jmp

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digits = load("digits")
language_model = load("language_model")
sys.modules["language_model"] = language_model  # autocast.py imports it by this name.
autocast = load("autocast")
diagnose = load("diagnose")
deep_network = load("deep_network")
precision = load("precision")


def table_rows(text, arms):
    """The cells of the lines that begin with the name of an arm."""
    rows = {arm: line.removeprefix(arm) for line in text.splitlines() for arm in arms if line.startswith(arm)}
    return {arm: row.split() for arm, row in rows.items()}


def test_precision_writes_the_page_of_its_own_source(tmp_path, capsys):
    page = tmp_path / "new folder" / "precision.html"
    precision.main(["--output", str(page)])
    assert capsys.readouterr().out.startswith("71 million parameters; ")
    text = page.read_text(encoding="utf-8")
    assert "precision.py" in text
    assert "the rule for &#x27;scores&#x27;" in text
    assert len(text) < 200_000


def test_digits_prints_its_table_and_draws_its_picture(tmp_path, capsys):
    picture = tmp_path / "new folder" / "digits.png"
    digits.main(["--size", "small", "--epochs", "2", "--seeds", "1", "--output", str(picture)])
    rows = table_rows(capsys.readouterr().out, digits.ARMS)
    assert list(rows) == list(digits.ARMS)
    for accuracy, spread, loss, skipped, _, activations, unit, milliseconds, ratio in rows.values():
        assert 0 < float(accuracy) < 100
        assert spread == f"({accuracy}-{accuracy})"
        assert 0 < float(loss) < 0.1
        assert float(skipped) == 0
        assert float(milliseconds) > 0
        assert float(ratio) > 0
        assert float(activations) > 0.1
        assert unit == "MiB"
    assert [row[4] for row in rows.values()] == ["1", "1", "32,768", "1"]
    assert rows["float32"][8] == "1.00"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000
    with Image.open(picture) as opened:  # The picture holds the table without the times.
        held = table_rows(opened.info["Description"], digits.ARMS)
    assert held == {arm: row[:7] for arm, row in rows.items()}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", ["--epochs", "0"], "--epochs and --seeds must be at least 1."),
        ("digits", ["--output", "digits.txt"], "--output must end in .png."),
        ("deep_network", ["--seeds", "-1"], "--steps and --seeds must be at least 1."),
        ("language_model", ["--save-every", "0"], "--steps and --save-every must be at least 1."),
        ("autocast", ["--steps", "0"], "--steps must be at least 1."),
        ("diagnose", ["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    ],
)
def test_a_wrong_option_of_an_example_ends_with_one_line(name, options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        globals()[name].main(options)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {message}")


@pytest.fixture
def end_of(monkeypatch, capsys):
    """Runs an example that ends early, in this process; returns its exit code and what it wrote."""

    def run(name, *options):
        script = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [script, *map(str, options)])
        monkeypatch.syspath_prepend(EXAMPLES)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


def test_run_exported_explains_itself(tmp_path, end_of):
    assert "in the order of jax.tree.leaves" in end_of("run_exported", "--help")[1]
    files = [tmp_path / name for name in ("program.bin", "in.npz", "out.npz")]
    missing = end_of("run_exported", *files)[2]
    assert missing.splitlines()[-1].endswith(f"error: There is no file {files[0]}.")


def test_every_option_of_an_example_has_help(end_of):
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert len(names) >= 10
    for name in names:
        _, text, _ = end_of(name, "--help")
        lines = text.splitlines()
        for line, after in zip(lines, [*lines[1:], ""]):
            if re.match(r"  (-\w, )?--?\w", line) and "[" not in line:
                described = re.search(r"\S  +\S", line) or re.match(r" {10,}\S", after)
                assert described, f"{name}: {line}"
        assert ("(default: " in text) == (name != "run_exported")
        assert "(default: None)" not in text


@pytest.mark.cases(slow=4)
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("digits", "--output"),
        ("deep_network", "--output"),
        ("language_model", "--checkpoint"),
        ("language_model", "--tensorboard"),
        ("export", "--output"),
        ("keras_model", "--save"),
        ("data_parallel", "--log"),
    ],
)
def test_an_output_that_cannot_be_written_ends_an_example_before_it_trains(name, option, tmp_path, end_of):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / {"keras_model": "a.keras", "digits": "a.png"}.get(name, "a")
    family = ["gpt2-small"] if name == "data_parallel" else []
    code, _, errors = end_of(name, *family, option, path)
    assert code == 2, errors
    assert re.search(r"(Not a directory|File exists)\.$", errors.splitlines()[-1])


@pytest.mark.parametrize(
    ("arm", "layers_that_learn"), [("float16, dynamic scale", 9), ("float16, no scale", 1)]
)
def test_at_the_start_of_digits_float16_without_a_scale_has_no_gradient_below_the_head(
    arm, layers_that_learn
):
    policy, loss_scale = digits.ARMS[arm]
    features, batch_size = digits.SIZES["default"]
    images, _, labels, _ = digits.load_data()
    model = digits.PixelClassifier(features)
    variables = model.init(jax.random.key(0), images[:1], train=False)
    tx = jmp.with_loss_scale(optax.adam(1e-2), loss_scale)  # Adam moves all that has a gradient.
    step = digits.make_train_step(model, policy, tx)
    before = jax.tree.map(np.array, variables["params"])  # The step is given the buffers.
    after, *_ = step(
        variables["params"],
        variables["batch_stats"],
        tx.init(before),
        images[:batch_size],
        labels[:batch_size],
    )
    moved = [name for name in before if np.any(before[name].get("kernel", 0) != after[name].get("kernel", 0))]
    moved += [name for name in before if np.any(before[name].get("scale", 0) != after[name].get("scale", 0))]
    assert len(moved) == layers_that_learn
    assert "Conv_4" in moved  # The head.


def events(folder):
    """The scalars in the event file of TensorBoard in a folder, as (name, step, value)."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.glob("events.out.tfevents.*")
    data, start = file.read_bytes(), 0
    while start < len(data):  # Each record is its length, a checksum, the event, a checksum.
        (length,) = struct.unpack_from("<Q", data, start)
        event = Event.FromString(data[start + 12 : start + 12 + length])
        yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)
        start += length + 16


def test_language_model_prints_its_table_and_writes_events_for_tensorboard(capsys, tmp_path):
    runs = language_model.main(["--size", "small", "--steps", "40", "--tensorboard", str(tmp_path)])
    found = {(name, step): value for name, step, value in events(tmp_path / "float16")}
    assert {name for name, _ in found} >= {"loss", "loss_scale", "grads_finite", "skipped_steps"}
    assert {step for _, step in found} == set(range(0, 40, 10))
    assert found["loss", 30] < found["loss", 0]
    assert (found["loss_scale", 0], found["loss_scale", 30]) == (2.0**15, 2.0**16)
    rows = table_rows(capsys.readouterr().out, language_model.ARMS)
    assert list(rows) == ["float32", "float16"]
    assert all(float(bits) < 5.5 for bits, *_ in rows.values())  # 8 at the start.
    assert runs["float16"].bits_per_byte == pytest.approx(runs["float32"].bits_per_byte, abs=0.05)
    assert runs["float16"].bits_per_byte != runs["float32"].bits_per_byte
    assert rows["float32"][1:3] == ["0", "1"]
    assert rows["float16"][1:3] == ["0", f"{2**15 * 2 ** (40 // 20):,}"]
    assert math.isfinite(float(rows["float16"][4]))


def test_autocast_prints_its_table_and_its_report(capsys):
    runs = autocast.main(["--size", "small", "--steps", "40"])
    out = capsys.readouterr().out
    rows = table_rows(out, autocast.ARMS)
    assert list(rows) == ["float32", "policy", "autocast"]
    assert all(float(bits) < 5.5 for bits, *_ in rows.values())  # 8 at the start.
    for arm in ("policy", "autocast"):
        assert runs[arm].bits_per_byte == pytest.approx(runs["float32"].bits_per_byte, abs=0.05)
        assert runs[arm].bits_per_byte != runs["float32"].bits_per_byte
    assert rows["float32"][3] == "1.00"
    summary = re.search(r"(\d+) of (\d+) operations in float16, (\d+) casts, ([\d.]+)% of FLOPs", out)
    half, total, casts, share = map(float, summary.groups())
    assert 0 < half < total
    assert casts > 0
    assert share > 90
    assert "model/blocks/0/attention/project" in out


@pytest.mark.exhaustive
def test_only_a_scale_for_each_layer_trains_the_deep_network(capsys, tmp_path):
    picture = tmp_path / "new folder" / "deep.png"
    found = deep_network.main(["--seeds", "1", "--steps", "150", "--output", str(picture)])
    last = {arm: runs[0][-15:].mean() for arm, runs in found.items()}
    assert list(last) == list(deep_network.ARMS)
    assert last.pop("float16, scale per layer") == pytest.approx(last["float32"], abs=0.1)
    full = last.pop("float32")
    assert full < 1.0
    assert min(last.values()) > full + 0.5
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    out = capsys.readouterr().out
    assert "More than 1 % of these becomes zero at every safe scale: params (backward)" in out
    rows = table_rows(out, list(found))
    assert [int(rows[arm][-1]) for arm in ("float32", "float16, scale per layer")] == [0, 0]
    assert int(rows["float16, static 2**40"][-1]) > 140  # Nearly every step overflows.


def test_with_layer_loss_scale_flushes_less_than_the_estimate_of_zhao_et_al_allows():
    """They choose each scale so that at most 0.1 % of the gradients of a layer become zero in float16."""
    shares = []

    @jax.custom_vjp
    def watch(x):
        return x

    def backward(_, g):
        flushed = jnp.mean((g.astype(jnp.float16) == 0) & (g != 0))
        jax.debug.callback(lambda share: shares.append(float(share)), flushed)
        return (g,)

    watch.defvjp(lambda x: (x, None), backward)
    params, (images, labels) = deep_network.init(0), deep_network.data()

    def flushed(wrap):
        layer = wrap(lambda w, x: jnp.tanh(watch(x @ w)))
        shares.clear()
        jax.grad(deep_network.loss_with(layer))(params, images, labels)
        jax.effects_barrier()
        return shares

    assert len(flushed(jmp.with_layer_loss_scale)) == deep_network.LAYERS
    assert max(shares) < 1e-3
    assert max(flushed(lambda layer: layer)) == 1.0


def test_diagnose_names_each_of_three_faults_and_mends_them(capsys):
    story = diagnose.main([])
    assert "find_nonfinite" in story.stuck
    worst, *others = story.first.findings
    assert worst.severity == "not finite"
    assert "use float32 instead of float16 on line" in worst.advice
    assert "attention" in worst.what
    assert "diagnose.py" in worst.where
    assert "a constant float32[32] is float32" in story.promoted
    # The second run: nothing is inf, and nothing moves.
    assert "gradients of all 50 steps were zero" in story.zero
    lost, *others = story.second.findings
    assert lost.what.startswith("Without a loss scale the error in float16 is ")
    assert "1.00e+00 in the gradients" in lost.what
    assert not any("is float32" in each.what or each.severity == "not finite" for each in others)
    assert story.flat[-10:].mean() == pytest.approx(story.flat[:10].mean(), rel=0.05)
    assert f"jmp.DynamicLossScale(2.0**{int(np.log2(story.scale))})" in lost.advice
    assert story.learned[-10:].mean() < 0.2 * min(story.learned[0], story.flat[-10:].mean())
    # README shows lines of the first finding. The errors depend on the machine.
    readme = (EXAMPLES.parent / "README.md").read_text()
    masked = lambda text: re.sub(r"error [\d.e-]+", "error ...", text)

    # The way to the loss depends on the version of JAX, too.
    def lines(text):
        return masked(re.sub(r"    from there: .*?\n(?=Remedies)", "", text, flags=re.DOTALL)).splitlines()

    shown = re.search(r"```text\n(1\. \[not finite\].*?)\n```", readme, re.DOTALL)[1]
    assert lines(shown) == lines(f"1. {worst}".replace(f"{EXAMPLES.parent}/", ""))
    out = " ".join(capsys.readouterr().out.split())  # Reports wrap at 90 columns.
    assert all(finding.what in out for finding in (*story.first.findings, *story.second.findings))
