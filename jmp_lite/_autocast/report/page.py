"""The report of autocast as a page: the source of the program, with the dtype in which each line ran."""

import collections
import linecache
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, TypeVar

import jax.numpy as jnp

from ..._text import cell_of, shortened
from .operations import AutocastOperation

T = TypeVar("T")
Operations = Sequence[AutocastOperation]
Marks = Sequence[tuple[str, str]]
"""What a diagnosis says of lines: the place of each, as `file.py:12:4 (function)`, and a sentence."""
_AROUND, _MOST = 2, 20  # Lines of source around a line with operations; rows of a table.
# The page is one file that loads nothing. Four classes carry the colours: half, f32, fp8, and left for the
# matmuls in float32.
_STYLE = """:root{color-scheme:light dark;--bg:#fff;--fg:#1f2328;--soft:#59636e;--edge:#d8dee4;--half:#0f6b52;
--f32:#954800;--fp8:#6d3391;--bad:#b3261e;--on-half:#dff3ec;--on-bad:#fbdcd8;--on-f32:#ffedd8;--on-fp8:#f0e4f9}
body{margin:0;background:var(--bg);color:var(--fg);font:14px/1.5 system-ui,sans-serif;
padding:16px max(16px,calc(50% - 550px))}@media screen and (prefers-color-scheme:dark){:root{--bg:#0d1117;
--fg:#e6edf3;--soft:#9198a1;--edge:#30363d;--half:#4cc9a4;--f32:#f0a35e;--fp8:#c596f0;--bad:#ff8a80;--on-half:#10312a;--on-bad:#4a1915;
--on-f32:#3a2710;--on-fp8:#2c1d3d}}*{box-sizing:border-box}h1{font-size:20px;margin:0}.soft{color:var(--soft)}
summary{cursor:pointer}.bar{display:flex;height:10px;border-radius:5px;overflow:hidden;background:var(--edge);
margin:10px 0 6px}.bar .half{background:var(--half)}.bar .f32{background:var(--f32)}
.bar .fp8{background:var(--fp8)}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;margin:16px 0}
td,th{padding:3px 8px;text-align:right;border-bottom:1px solid var(--edge);white-space:nowrap}
td:first-child,th:first-child{text-align:left}.file{margin:16px 0}.file>summary{font-weight:600;
overflow-wrap:anywhere}.src{border:1px solid var(--edge);border-radius:6px;overflow-x:auto;margin-top:6px;
padding:4px 0}.line{display:grid;grid-template-columns:3.4em 9em 9em 4em minmax(max-content,1fr);gap:0 6px;
padding:0 6px;font:12.5px/1.7 ui-monospace,monospace;white-space:pre;list-style:none}
.line::-webkit-details-marker{display:none}.no{color:var(--soft);text-align:right}
summary .no::before{content:"▸ "}[open]>summary .no::before{content:"▾ "}
.chip{border-radius:4px;padding:0 6px;overflow:hidden}.chip small{font-size:11px}
.move,.head{color:var(--soft)}.half.chip{color:var(--half);background:var(--on-half)}
.f32.chip{color:var(--f32);background:var(--on-f32)}.fp8.chip{color:var(--fp8);background:var(--on-fp8)}.left.chip{color:var(--bad);background:var(--on-bad)}
.why{color:var(--f32);font-style:italic}.mixed.chip{background:var(--edge)}
.mark{position:sticky;left:0;max-width:min(1060px,calc(100vw - 34px));margin:2px 0 2px 3.6em;padding:1px 8px;
border-left:3px solid var(--bad);color:var(--bad);white-space:pre-wrap;overflow-wrap:anywhere}
.ops{position:sticky;left:0;max-width:min(1060px,calc(100vw - 34px));padding:6px 8px 8px 3.6em;
font-size:12.5px;border-block:1px solid var(--edge);overflow-wrap:anywhere}.ops div{margin:4px 0}
code,pre{font:12px/1.5 ui-monospace,monospace}pre{overflow-x:auto}@media(max-width:640px){body{padding:8px}
.line{grid-template-columns:3em 3.6em 3.6em minmax(max-content,1fr);gap:0 3px}
.chip{padding:0 2px;text-align:center;font-size:11px}.head i{font-size:9px}.chip small,.share{display:none}
.ops{padding-left:8px}td,th{padding:3px 4px;font-size:12px}td:nth-child(5),th:nth-child(5){display:none}}
a{color:inherit}@media print{body{print-color-adjust:exact}.line{white-space:pre-wrap;
grid-template-columns:3em 7.5em 7.5em 4em 1fr}}"""
_HEAD = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'


def page_of(operations: Operations, title: str, summary: str, text: str, marks: Marks = ()) -> str:
    """Returns the page as HTML: the shares, the modules, the source, and the report as text.

    All that the program or its user wrote is escaped, and nothing is loaded from elsewhere. The files with
    `marks` come first, and each mark is written below its line.
    """
    files = _by_line((each.caller or each.source, each) for each in operations)
    marked = _by_line(dict.fromkeys(marks))
    total = _flops(operations) or 1  # A program without matmuls may have no FLOPs.
    shares = {file: sum(map(_flops, files[file].values())) / total for file in {**files, **marked}}
    parts = [f"<h1>{escape(title)}</h1><div>{escape(_in_short(operations))}</div>"]
    parts += [f"<div class=soft>{escape(summary)}</div>"]
    parts += [*_bar(operations, total), *_modules(operations, total)] if operations else []
    # Files with marks first, then by their share; what has no source last.
    for file in sorted(shares, key=lambda file: (file == "", file not in marked, -shares[file])):
        parts += _file(file, files[file], marked[file], shares[file], total)
    parts.append(f"<details><summary>As text</summary><pre>{escape(text)}</pre></details>")
    return f"{_HEAD}<title>{escape(title)}</title><style>{_STYLE}</style><body>{''.join(parts)}"


def _in_short(operations: Operations) -> str:
    """Returns how many matmuls are in half precision, and the most frequent reasons of the others."""
    matmuls = [operation for operation in operations if operation.is_product]
    reasons = collections.Counter(each.reason for each in matmuls if not each.in_half)
    if not reasons:
        return f"All {len(matmuls):,} matmuls run in half precision." if matmuls else ""
    few = f"{reasons.total():,} of {len(matmuls):,} matmuls are not in half precision"
    if len(reasons) == 1:
        return f"{few}: {next(iter(reasons))}."
    told = [f"{count:,} ({reason})" for reason, count in reasons.most_common(3)]
    others = reasons.total() - sum(count for _, count in reasons.most_common(3))
    return f"{few}: {', '.join(told)}{f', {others:,} for other reasons' if others else ''}."


def _by_line(placed: Iterable[tuple[str, T]]) -> dict[str, dict[str, list[T]]]:
    """Returns what belongs to each line of each file, of pairs of a place and what belongs to it."""
    files: Any = collections.defaultdict(lambda: collections.defaultdict(list))
    for place, each in placed:
        file, line = _place(place)
        files[file][line].append(each)
    return files


def _place(place: str) -> tuple[str, str]:
    """Returns the file and the number of a line; without a source, no file and the whole place."""
    # A place of a notebook's cell has a source too, which IPython has given to `linecache`.
    match = re.match(r"(.*?):(\d+)", place)
    return (match[1], match[2]) if match and linecache.getlines(match[1]) else ("", place)


def _flops(operations: Iterable[AutocastOperation]) -> int:
    return sum(operation.flops for operation in operations)


def _kind(operation: AutocastOperation) -> tuple[str, str]:
    """Returns the class of an operation in the style sheet, and its dtype as jaxprs print it."""
    if operation.in_fp8:
        return "fp8", "fp8"
    dtypes = [each.dtype for each in (*operation.operands, *operation.results)]
    # By the size of the dtype: 2 for both halves. Of an operation in float32, the widest dtype that it has.
    sizes = {each.itemsize: each.name for each in dtypes if jnp.issubdtype(each, jnp.inexact)}
    name = sizes.get(2 if operation.in_half else 0) or sizes[max(sizes)]
    return "half" if operation.in_half else "f32", name.replace("bfloat", "bf").replace("float", "f")


def _bar(operations: Operations, total: int) -> Iterator[str]:
    """Yields the shares of the FLOPs by dtype, as a bar and in words."""
    flops = collections.Counter[tuple[str, str]]()
    for operation in operations:
        flops[_kind(operation)] += operation.flops
    kinds = [(*kind, f"{flops[kind] / total:.1%}") for kind in sorted(flops, reverse=True) if flops[kind]]
    bars = "".join(f"<i class={kind} style='width:{share}'></i>" for kind, _, share in kinds)
    keys = "".join(f"<b class='chip {kind}'>{dtype} {share}</b> " for kind, dtype, share in kinds)
    yield f"<div class=bar>{bars}</div>{keys}of the FLOPs"


def _modules(operations: Operations, total: int) -> Iterator[str]:
    """Yields the table of the modules, those with the most FLOPs in float32 first."""
    large = _large_modules(operations, total)
    left = {name: _flops(each for each in own if not each.in_half) for name, own in large.items()}
    yield "<div class=wide><table><tr><th>module<th>in float32<th>FLOPs<th>Tensor Cores<th>operations in half"
    rows: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name in sorted(large, key=lambda name: -left[name]):
        own = large[name]
        flops, fast = _flops(own), _flops(each for each in own if each.on_tensor_cores)
        cells = f"<td>{left[name] / total:.1%}<td>{flops / total:.1%}<td>{fast / flops:.1%}"
        cells += f"<td>{sum(each.in_half for each in own):,} of {len(own):,}"
        rows[_alike(name), cells].append(name)
    for (_, cells), names in [*rows.items()][:_MOST]:
        label = f"{_in_one(names)}, {len(names)} alike" if len(names) > 1 else names[0] or "/"
        costly = max(large[names[0]], key=lambda each: each.flops)
        anchor = escape(":".join(_place(costly.caller or costly.source)), quote=True)
        yield f'<tr><td><a href="#{anchor}">{escape(label)}</a>{cells}'
    yield f"<tr><td>and {len(rows) - _MOST} more" if len(rows) > _MOST else ""
    yield "</table></div>"


def _in_one(names: Sequence[str]) -> str:
    """Returns several names of equal depth as one, such as `decoder/h_0 … h_22/attn`."""
    parts = zip(*(name.split("/") for name in names), strict=True)
    return "/".join(part[0] if len({*part}) == 1 else f"{part[0]} … {part[-1]}" for part in parts)


def _alike(name: str) -> str:
    """Returns the name of a module without the numbers of layers, which equal layers share."""
    return re.sub(r"\d+", "#", name)


def _large_modules(operations: Operations, total: int) -> Mapping[str, Operations]:
    """Returns the modules with a share of the FLOPs, as deep as the table stays short."""
    # From 8 names of a path on down, until at most `_MOST` modules are left. One with less than 0.05 % of the
    # FLOPs has no row.
    depth, large = 9, dict[str, list[AutocastOperation]]()
    while depth > 2 and not 0 < len({*map(_alike, large)}) <= _MOST:
        depth, modules = depth - 1, collections.defaultdict[str, list[AutocastOperation]](list)
        for each in operations:
            # `jnp.einsum` names a scope by its equation.
            names = [name for name in each.module.split("/") if "->" not in name]
            modules["/".join(names[:depth])].append(each)
        large = {name: own for name, own in modules.items() if _flops(own) >= total / 2000}
    return large


def _file(
    file: str, lines: Mapping[str, Operations], marks: Mapping[str, Sequence[str]], share: float, total: int
) -> Iterator[str]:
    """Yields a file: its share of the FLOPs, and its lines."""
    name = escape(cell_of(file) or shortened(file)) if file else "without source"
    yield f"<details class=file{' open' if share >= 0.02 or marks else ''}>"  # What costs little is folded.
    of_flops = f" <span class=soft>{share:.1%} of FLOPs</span>" if share else ""
    yield f"<summary>{name}{of_flops}</summary><div class=src>"
    yield "<div class='line head'><i></i><i>forward</i><i>backward</i><i class=share>FLOPs</i></div>"
    for number, row in _rows(linecache.getlines(file) if file else [], lines, marks, total):
        yield f'<a id="{escape(f"{file}:{number}", quote=True)}"></a>{row}'
    yield "</div></details>"


def _rows(
    source: Sequence[str], lines: Mapping[str, Operations], marks: Mapping[str, Sequence[str]], total: int
) -> Iterator[tuple[str, str]]:
    """Yields the lines with operations or marks and those around them, each with its number.

    Without a source, these are places.
    """
    # Without a source, the keys of `lines` are whole places.
    last, places = 0, {*lines, *marks}

    def row(number, code, key):
        return _line(number, code, lines.get(key, ()), marks.get(key, ()), total)

    for place in () if source else sorted(places, key=lambda place: -_flops(lines.get(place, ()))):
        yield place, row("", shortened(place) or "made by JAX", place)
    for number in _near(map(int, places if source else ()), len(source)):
        gap = "<div class='line soft'><i class=no>⋯</i></div>" if number > last + 1 else ""
        last = number
        yield str(number), gap + row(str(number), source[number - 1].rstrip(), str(number))


def _near(numbers: Iterable[int], count: int) -> list[int]:
    """Returns some of the `count` lines of a file and those around them, in their order."""
    near = {number + more for number in numbers for more in range(-_AROUND, _AROUND + 1)}
    return sorted(near & {*range(1, count + 1)})


def _line(number: str, code: str, operations: Operations, marks: Sequence[str], total: int) -> str:
    """Returns a line of source with its dtypes; below it its marks and, folded, its operations."""
    chips = [_chip([each for each in operations if each.backward == backward]) for backward in (False, True)]
    share = f"{_flops(operations) / total:.1%}"
    share = "" if share == "0.0%" else share
    line = f"<span class=no>{number}</span>{''.join(chips)}<span class='soft share'>{share}</span>"
    line += f"<span>{escape(code)}{_asked(operations)}</span>"
    below = "".join(f"<div class=mark>{escape(shortened(mark))}</div>" for mark in marks)
    if not operations:
        return f"<div class=line>{line}</div>{below}"
    told = _told(operations)
    return f"<details><summary class=line>{line}</summary><div class=ops>{told}</div></details>{below}"


def _asked(operations: Operations) -> str:
    """Returns what the user asked for that decided about operations of a line."""
    asked = {each.reason: None for each in operations if each.why in ("rule", "option", "keep_float32")}
    return f"<span class=why>  ← {escape('; '.join(asked))}</span>" if asked else ""


def _told(operations: Operations) -> str:
    """Returns the operations of a line with the reasons, equal ones once."""
    rows = collections.Counter[str]()
    for each in operations:
        reason = [each.reason, each.advice, "backward pass" if each.backward else ""]
        text = escape(f"{each.name} {' '.join(each.inputs)} → {' '.join(each.outputs)}")
        rows[f"<code>{text}</code><br>{escape('; '.join(filter(None, reason)))}"] += 1
    told = "".join(f"<div>{text}{f' ({n}x)' * (n > 1)}</div>" for text, n in rows.most_common(_MOST))
    return told + (f"and {len(rows) - _MOST:,} more" if len(rows) > _MOST else "")


def _chip(operations: Operations) -> str:
    """Returns the dtype of a line in one direction: that of its matmuls if it has any, and what decided."""
    computed = [o for o in operations if o.category != "move" and o.name != "convert_element_type"]
    shown = [each for each in computed if each.is_product] or computed
    kinds = {_kind(operation) for operation in shown}
    if len(kinds) != 1:
        kind = "mixed" if kinds else "move" if operations else ""
        return f"<span class='chip {kind}'>{kind}</span>"
    # What the user asked for says most, then a deny list, then what costs most.
    first = max(shown, key=lambda each: (each.why != "other", each.category == "deny", each.flops))
    by = first.category if first.why == "other" else first.why.replace("keep_float32", "kept")
    ((kind, dtype),) = kinds
    kind = "left" if kind == "f32" and first.is_product else kind  # What Tensor Cores could run.
    return f"<span class='chip {kind}'>{dtype} <small>{by}</small></span>"
