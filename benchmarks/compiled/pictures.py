"""Draws the pictures of the documentation that need no training: the dtypes of a small model, and the rooms.

    python -m benchmarks.compiled.pictures

A picture is an SVG file whose texts are texts, so a test can read them. The command also makes the dark
version of the README's plot from the light one, which `examples/digits.py` draws.
"""

import ast
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

import jmp_lite as jmp

ROOT = pathlib.Path(__file__).parent.parent.parent
HALF, FULL, OTHER, LINE = "#2a6fbb", "#d9822b", "#c9ccd1", "#4a4f57"


def small_model() -> tuple[Any, tuple[Any, ...]]:
    """Returns the loss of a block of a transformer without attention, and its arguments."""
    width, batch, classes = 64, 8, 16
    params = {
        "norm": {"scale": jnp.ones(width)},
        "up": {"kernel": jnp.ones((width, 4 * width)), "bias": jnp.zeros(4 * width)},
        "down": {"kernel": jnp.ones((4 * width, width)), "bias": jnp.zeros(width)},
        "head": {"kernel": jnp.ones((width, classes))},
    }

    def loss_fn(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        with jax.named_scope("norm"):
            mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
            h = x * jax.lax.rsqrt(mean_square + 1e-6) * params["norm"]["scale"]
        with jax.named_scope("up"):
            h = h @ params["up"]["kernel"] + params["up"]["bias"]
        h = jax.nn.gelu(h)
        with jax.named_scope("down"):
            h = h @ params["down"]["kernel"] + params["down"]["bias"]
        x = x + h
        with jax.named_scope("head"):
            logits = x @ params["head"]["kernel"]
        with jax.named_scope("loss"):
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss_fn, (params, jnp.ones((batch, width)), jnp.zeros(batch, jnp.int32))


def draw_plan(path: pathlib.Path) -> None:
    """Draws in which dtype autocast runs each operation of a small model."""
    loss_fn, arguments = small_model()
    found = jmp.explain(loss_fn, "float16")(*arguments).operations
    operations = [operation for operation in found if operation.category not in ("move", "as traced")]
    figure = Figure(figsize=(9, 0.235 * len(operations) + 0.7))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    scope = None
    for row, operation in enumerate(operations):
        outputs = str(operation.outputs)
        gives = HALF if "float16" in outputs else FULL if "float32" in outputs else OTHER
        axes.barh(-row, 0.15, 0.82, left=0.16, color=HALF if operation.in_half else FULL)
        axes.barh(-row, 0.15, 0.82, left=0.31, color=gives)
        weight = "bold" if operation.on_tensor_cores else None
        axes.text(0.17, -row, operation.name, color="white", va="center", weight=weight)
        module = operation.module.split("/")[0]
        if module != scope:
            scope = module
            axes.text(0.15, -row, scope or "-", color=LINE, va="center", ha="right")
        axes.text(0.475, -row, operation.reason, color=LINE, va="center", fontsize=8)
    for index, (name, color) in enumerate({"float16": HALF, "float32": FULL, "other": OTHER}.items()):
        axes.barh(1.6, 0.1, 0.9, left=0.16 + 0.12 * index, color=color)
        axes.text(0.21 + 0.12 * index, 1.6, name, color="white", va="center", ha="center")
    legend = "left: operands, right: result; bold: a product on Tensor Cores"
    axes.text(0.53, 1.6, legend, color=LINE, va="center", fontsize=9)
    axes.set(xlim=(0, 1.25), ylim=(-len(operations), 2.4))
    axes.axis("off")
    _save(figure, path)


WIDTH, HEIGHT = 0.17, 0.42  # Of the box of a room.
FLOORS = (
    ("testing/",),
    ("linen.py", "nnx.py", "diagnostics/"),
    ("_cast_params.py", "_flax/", "_autocast/", "programs/"),
    ("_policy.py", "_scaling/", "_float8/", "_attention/"),
    ("_memory/",),
    ("_jaxpr/",),
    ("_tree.py",),
    ("_dtypes.py", "_names.py", "_paths.py", "_text.py"),
)


def draw_rooms(path: pathlib.Path) -> None:
    """Draws the rooms of jmp_lite on their floors; an arrow leads from a room to a room that it imports.

    An arrow to a room to which other arrows lead as well is left out.
    """
    figure = Figure(figsize=(8, 7))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    centres = {
        room: ((index + 1) / (len(floor) + 1), len(FLOORS) - level)
        for level, floor in enumerate(FLOORS)
        for index, room in enumerate(floor)
    }
    imported = {room: imported_rooms(room) for room in centres}
    for room, (x, y) in centres.items():
        for other in imported[room] - set().union(*(_reached(each, imported) for each in imported[room])):
            style = {"arrowstyle": "-|>", "color": "#9aa1ab", "shrinkA": 3, "shrinkB": 3, "lw": 1.1}
            to_x, to_y = centres[other]
            axes.annotate("", (to_x, to_y + HEIGHT / 2), (x, y - HEIGHT / 2), arrowprops=style, zorder=0)
    for room, (x, y) in centres.items():
        _box(axes, room, x, y)
    axes.set(xlim=(0, 1), ylim=(0.5, len(FLOORS) + 0.5))
    axes.axis("off")
    _save(figure, path)


def imported_rooms(room: str) -> set[str]:
    """Returns the rooms that the files of a room import."""
    where = ROOT / "jmp_lite" / room
    files = sorted(where.rglob("*.py")) if where.is_dir() else [where]
    names = {each.rstrip("/").removesuffix(".py"): each for floor in FLOORS for each in floor}
    found = set()
    for file in files:
        depth = len(file.relative_to(ROOT / "jmp_lite").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == depth:
                modules = [node.module] if node.module else [alias.name for alias in node.names]
                found |= {names[each.split(".")[0]] for each in modules if each.split(".")[0] in names}
    return found - {room}


def _reached(room: str, imported: dict[str, set[str]]) -> set[str]:
    """Returns the rooms that a room imports, and those that they import."""
    return imported[room].union(*(_reached(each, imported) for each in imported[room]))


def _box(axes: Axes, name: str, x: float, y: float) -> None:
    corner = (x - WIDTH / 2, y - HEIGHT / 2)
    box = FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle="round,pad=0.005", fc="white", ec=HALF, lw=1.4)
    axes.add_patch(box)
    axes.text(x, y, name, ha="center", va="center", color=LINE, family="monospace")


def _save(figure: Figure, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "jmp_lite", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):
        figure.savefig(path, metadata={"Date": None})


def darkened(path: pathlib.Path) -> Image.Image:
    """Returns a plot for a dark page: the lightness is inverted, as in docs/stylesheets/site.css, and the
    background is transparent.
    """
    turn = np.array(
        [[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]]
    )  # hue-rotate(180deg)
    with Image.open(path) as light:
        colors = np.clip((1 - np.asarray(light.convert("RGB")) / 255) @ turn.T, 0, 1)
    opacity = colors.max(-1, keepdims=True)
    colors = np.concatenate([colors / np.maximum(opacity, 1e-6), opacity], -1)
    return Image.fromarray(np.uint8(np.round(255 * colors)))


PICTURES = {"plan.svg": draw_plan, "rooms.svg": draw_rooms}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw(ROOT / "docs" / name)
    darkened(ROOT / "docs" / "digits.png").save(ROOT / "docs" / "digits_dark.png", optimize=True)
