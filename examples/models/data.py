"""Real data that comes with Python, scikit-learn and scikit-image. Nothing is downloaded."""

import ast
import functools
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

import numpy as np

# scikit-learn and scikit-image are imported where they are used: text needs neither.


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns the 1,797 scanned digits of scikit-learn.

    Returns:
        Images `(1797, 8, 8)`, float32, 0 to 1, and the digits `(1797,)`, int32.
    """
    import sklearn.datasets

    scans: Any = sklearn.datasets.load_digits()
    return (scans["images"] / 16).astype(np.float32), scans["target"].astype(np.int32)


@functools.cache
def pictures() -> tuple[np.ndarray, ...]:
    """Returns six grey photographs of scikit-image, each `(height, width)`, float32, 0 to 1."""
    import skimage.data

    names = ("camera", "brick", "grass", "gravel", "moon", "page")
    return tuple(getattr(skimage.data, name)().astype(np.float32) / 255 for name in names)


@functools.cache
def coins() -> tuple[np.ndarray, np.ndarray]:
    """Returns a photograph of coins and a mask of the coins.

    Returns:
        The picture `(303, 384)`, float32, 0 to 1, and the mask, int32, 1 for coins. The mask is Otsu's
        threshold, corrected for uneven light, without small specks.
    """
    import skimage.data
    import skimage.filters
    import skimage.measure

    picture = skimage.data.coins().astype(np.float32) / 255
    smooth = skimage.filters.gaussian(picture, 1.5)
    bright = smooth > np.maximum(
        skimage.filters.threshold_local(smooth, 151), 0.9 * skimage.filters.threshold_otsu(smooth)
    )
    parts: Any = skimage.measure.label(bright)
    large = np.bincount(parts.ravel()) > 300
    large[0] = False
    return picture, large[parts].astype(np.int32)


def _modules() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))]


@functools.cache
def source_text() -> np.ndarray:
    """Returns two million bytes of the standard library's modules, uint8."""
    return np.frombuffer("".join(_modules()).encode()[:2_000_000], np.uint8)


@functools.cache
def docstrings() -> tuple[tuple[str, str], ...]:
    """Returns the functions of the standard library: the first line of each docstring, and the name."""
    pairs = set()
    for text in _modules():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (doc := ast.get_docstring(node)):
                pairs.add((doc.splitlines()[0], node.name))
    return tuple(sorted(pairs))


@functools.cache
def name_counts(names: int = 1000) -> np.ndarray:
    """Returns how often each module of the standard library uses each name.

    Args:
        names: the number of names, the most frequent first.

    Returns:
        Counts `(modules, names)`, int32.
    """
    used = []
    for text in _modules():
        lines = iter(text.splitlines(keepends=True))
        tokens = tokenize.generate_tokens(lambda lines=lines: next(lines, ""))
        used.append([token.string for token in tokens if token.type == tokenize.NAME])
    found, counts = np.unique(np.concatenate(used), return_counts=True)
    column = {name: index for index, name in enumerate(found[np.argsort(-counts, kind="stable")[:names]])}
    table = np.zeros((len(used), len(column)), np.int32)
    for row, words in enumerate(used):
        np.add.at(table[row], [column[word] for word in words if word in column], 1)
    return table
