"""Writes into a source what a report says that mends it, and compares what the sources compute."""

import ast
import re

import jax
import numpy as np


def widened(source, words, half=("F16", "BF16", "H")):
    """The source with F32 in place of half dtypes, in the calls at the places that are named in the words.

    A place is the line and the column at which a call begins, as in `/drawn/loss.py:3:9`, or the line alone,
    of a cast of a policy.
    """
    places = {(int(row), int(column)) for row, column in re.findall(r"\.py:(\d+):(\d+)", words)}
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    lines, found = source.splitlines(keepends=True), set()
    # Several calls may begin at one place, as in `x.astype(F16).sum()`: the arguments of each are widened.
    names = [
        (name.lineno, name.col_offset, name.end_col_offset, (call.lineno, call.col_offset))
        for call in calls
        if (call.lineno, call.col_offset) in places
        for name in (call.func, *call.args, *(keyword.value for keyword in call.keywords))
        if (isinstance(name, ast.Name) and name.id in half) or getattr(name, "attr", "") == "dtype"
    ]
    for row, start, end, place in sorted(names, reverse=True):
        found.add(place)
        lines[row - 1] = f"{lines[row - 1][:start]}F32{lines[row - 1][end:]}"
    assert found == places, f"No call makes half values at {places - found}:\n{source}"
    for row in {int(row) for row in re.findall(r"\.py:(\d+)(?![\d:])", words)}:
        lines[row - 1] = re.sub(rf"\b({'|'.join(half)})\b", "F32", lines[row - 1])
    return "".join(lines)


def started_in_float32(source, words):
    """The source with `wide(...)` around what the loops start from whose carries should start in float32."""
    said = re.findall(r"start the carry in float32 for the loop on (lines? [^;]*)", words)
    places = {(int(r), int(c)) for text in said for r, c in re.findall(r"\.py:(\d+):(\d+)", text)}
    lines, found = source.splitlines(keepends=True), set()
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    position = {"scan": 1, "while_loop": 2, "fori_loop": 3}
    for call in calls:
        name, place = ast.unparse(call.func).rpartition(".")[2], (call.lineno, call.col_offset)
        if place in places and name in position:
            start = call.args[position[name]]
            line, end = lines[start.lineno - 1], start.end_col_offset
            text = f"wide({line[start.col_offset : end]})"
            lines[start.lineno - 1] = line[: start.col_offset] + text + line[end:]
            found.add(place)
    assert found == places, f"No loop at {places - found}:\n{source}"
    return "".join(lines)


def vector(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def error(found, exact):
    """The larger relative error of a loss and of a vector of gradients; NaN if one of them is."""
    norm = np.linalg.norm
    # A program whose half values are all arguments has no gradient.
    of_gradients = norm(found[1] - exact[1]) / (norm(exact[1]) or 1)
    return np.maximum(abs(found[0] - exact[0]) / abs(exact[0]), of_gradients)
