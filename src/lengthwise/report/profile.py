"""Profiles of operators to people: a page, and files for machines."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.cost.profiles import OperatorView, ProfileCheck, ProfileView
from lengthwise.report.formatting import UNKNOWN, percent, rounded
from lengthwise.report.html_document import asset, document, header, plotly_js, scrolling, section, swatch
from lengthwise.report.json_file import plain
from lengthwise.schema.files import write_whole
from lengthwise.schema.profile import OPERATOR_PARTS, Profile

_NAMES = {"seqs": "sequences", "kv_tokens": "KV tokens", "kv_heads": "KV heads", "head_dim": "head width"}
_SAID = (
    "tokens", "seqs", "chunk", "context", "kv_tokens", "n", "k", "heads", "kv_heads", "head_dim", "window",
    "experts", "topk", "gpus", "bytes",
)  # fmt: skip


def axes_text(view: OperatorView) -> str:
    """The ranges of an operator's axes ("chunk 16 to 2,048, context 0 to 16,384")."""
    return ", ".join(_range(_NAMES.get(name, name), *view.axes[name]) for name in _SAID if name in view.axes)


def _range(name: str, low: int, high: int) -> str:
    return f"{name} {low:,}" if low == high else f"{name} {low:,} to {high:,}"


def time_text(seconds: float) -> str:
    """A time with the unit that suits it, from microseconds on ("8.35 us")."""
    if not math.isfinite(seconds):
        return UNKNOWN
    scale, unit = (1e6, "us") if abs(seconds) < 1e-3 else (1e3, "ms") if abs(seconds) < 1 else (1.0, "s")
    return f"{rounded(seconds * scale, math.nan)[0]} {unit}"


def share_text(share: float | None) -> str:
    """A share as a percentage; what is not known is a dash."""
    return UNKNOWN if share is None else percent(share)


def shard_text(view: OperatorView) -> str:
    """Which shard an operator belongs to."""
    return f"TP {view.tp}" if view.tp else "kernel"


Figure = dict[str, Any]
LINES = 7
MIN_COUNT = 3
_MAX_CURVE_POINTS = 120


def line_figure(view: ProfileView, one: OperatorView) -> Figure | None:
    """The figure of an operator; None where no line of it has points enough."""
    rows = view.profile.where(np.isin(np.arange(len(view.profile)), one.rows))
    rows, said = _one_shape(rows, one)
    part = OPERATOR_PARTS[one.operator]
    x, axis, lines = _AXES[part if part in _AXES else "gemm"](rows)
    curves = _curves(x, rows["seconds"], lines)
    if not curves:
        return None
    shard = f"TP {one.tp}" if one.tp else one.dtype
    return {
        "id": f"lines-{one.operator.replace(' ', '-')}-{one.tp}-{one.dtype or 'any'}",
        "kind": "lines",
        "title": f"{one.operator.capitalize()}{', ' * bool(shard)}{shard}",
        "message": said,
        "x": axis,
        "curves": curves,
    }


def _one_shape(rows: Profile, one: OperatorView) -> tuple[Profile, str]:
    """Of attention kernels of no model, those of the shape, cache and window that was measured most."""
    if one.tp or OPERATOR_PARTS[one.operator] not in ("prefill", "decode"):
        return rows, ""
    names = ("heads", "kv_heads", "head_dim", "window")
    shapes = np.stack([rows[name] for name in names], axis=1)
    found, which, counts = np.unique(shapes, axis=0, return_inverse=True, return_counts=True)
    best = int(np.flatnonzero(counts == counts.max())[-1])
    caches, many = np.unique(rows["kv_dtype"], return_counts=True)
    cache = caches[int(np.argmax(many))]
    heads, kv, width, window = found[best].tolist()
    text = f"{_plural(heads, 'head')} of {width}, {kv} for keys and values, cache in {cache or 'the same dtype'}"
    text += f", window {window:,}" if window else ""
    return rows.where((which.ravel() == best) & (rows["kv_dtype"] == cache)), text


Lines = tuple[npt.NDArray[Any], str, list[str]]


def _prefill(rows: Profile) -> Lines:
    if rows["context"].any():
        return rows["chunk"], "tokens of the chunk", [f"context {c:,}" for c in rows["context"].tolist()]
    return rows["chunk"], "tokens of a prompt", [_plural(n, "prompt") for n in rows["seqs"].tolist()]


def _decode(rows: Profile) -> Lines:
    mean = np.rint(rows["kv_tokens"] / np.maximum(rows["seqs"], 1)).astype(int)
    equal = rows["skew"] <= 1
    return rows["seqs"], "sequences", [
        f"context {c:,}" if same else "" for c, same in zip(mean.tolist(), equal.tolist(), strict=True)
    ]  # fmt: skip


def _bytes(rows: Profile) -> Lines:
    who = zip(rows["gpus"].tolist(), rows["backend"].tolist(), strict=True)
    return rows["bytes"], "bytes", [f"{gpus} GPUs {backend}".strip() for gpus, backend in who]


def _shapes(rows: Profile) -> Lines:
    if rows["experts"].any():
        each = (rows[name].tolist() for name in ("topk", "experts", "n", "k"))
        return rows["tokens"], "tokens", [
            f"{t} of {e}, {n:,} x {k:,}" for t, e, n, k in zip(*each, strict=True)
        ]  # fmt: skip
    pairs = zip(rows["n"].tolist(), rows["k"].tolist(), strict=True)
    return rows["tokens"], "tokens", [f"n {n:,}, k {k:,}" for n, k in pairs]


_AXES: dict[str, Callable[[Profile], Lines]] = {
    "prefill": _prefill,
    "decode": _decode,
    "comm": _bytes,
    "send": _bytes,
    "gemm": _shapes,
}


def _curves(x: npt.NDArray[Any], seconds: npt.NDArray[np.float64], lines: list[str]) -> list[dict[str, Any]]:
    """A few lines with the most points, in order of their one number, else from the fastest to the slowest."""
    names = np.array(lines, dtype=np.str_)
    found, which, counts = np.unique(names, return_inverse=True, return_counts=True)
    usable = [i for i in range(len(found)) if found[i] and counts[i] >= MIN_COUNT]
    usable = [i for i in usable if counts[i] * 2 >= max(counts[j] for j in usable)]
    usable.sort(key=lambda i: (float(np.median(seconds[which == i])), str(found[i])))
    if len(usable) > LINES:
        usable = [usable[i] for i in np.linspace(0, len(usable) - 1, LINES).round().astype(int)]
    usable.sort(key=lambda i: _number(str(found[i])))
    return [_curve(str(found[i]), x[which == i], seconds[which == i]) for i in usable]


def _number(name: str) -> int:
    """The number in a line's name; 0 where there are several, which leaves the order as it is."""
    words = [word.replace(",", "") for word in name.split()]
    digits = [int(word) for word in words if word.isdigit()]
    return digits[0] if len(digits) == 1 else 0


def _curve(name: str, x: npt.NDArray[Any], seconds: npt.NDArray[np.float64]) -> dict[str, Any]:
    places, which = np.unique(x, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    groups = np.split(seconds[order], np.cumsum(np.bincount(which.ravel()))[:-1])
    kept = np.unique(np.linspace(0, len(places) - 1, min(_MAX_CURVE_POINTS, len(places))).astype(int))
    return {"name": name, "x": numbers(places[kept]), "y": numbers([np.median(groups[i]) for i in kept])}


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def numbers(values: Any) -> list[float | None]:
    """Numbers with five digits; what is not finite becomes null, a gap in the curve."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in np.asarray(values, float).tolist()]


_MAX_MAP_POINTS = 1500


def map_figure(view: ProfileView, one: OperatorView) -> Figure | None:
    """Points and gaps over (chunk, context) or (sequences, mean context); None for other operators."""
    part = OPERATOR_PARTS[one.operator]
    if not one.tp or part not in ("prefill", "decode"):
        return None
    columns = {name: view.profile[name][one.rows].astype(float) for name in ("seqs", "chunk", "context", "kv_tokens")}
    x, y, axes = columns["chunk"], columns["context"], ("tokens of the chunk", "cached context, tokens")
    if part == "decode":
        x, y = columns["seqs"], np.rint(columns["kv_tokens"] / np.maximum(columns["seqs"], 1))
        axes = ("sequences", "mean context, tokens")
    places = np.unique(np.stack([x, y], axis=1), axis=0)
    if len(places) > _MAX_MAP_POINTS:
        places = places[np.linspace(0, len(places) - 1, _MAX_MAP_POINTS).astype(int)]
    return {
        "id": f"map-{one.operator.replace(' ', '-')}-{one.tp}-{one.dtype or 'any'}",
        "kind": "map",
        "title": f"{one.operator.capitalize()}, TP {one.tp}",
        "x": axes[0],
        "y": axes[1],
        "points": {"x": numbers(places[:, 0]), "y": numbers(places[:, 1])},
        "gaps": [[bound for _, low, high in gap.axes for bound in (low, high)] for gap in one.gaps],
    }


PANELS: dict[str, tuple[str, ...]] = {
    "Matrix products": (
        "qkv projection", "output projection", "mlp up", "mlp down", "lm head", "latent projection",
        "query projection", "kv up-projection", "router", "experts up", "experts down", "fused moe",
        "shared mlp up", "shared mlp down",
    ),
    "What only moves bytes": (
        "input norm", "post-attention norm", "norms", "residual add", "rope", "kv write", "activation",
        "expert activation", "shared activation", "embedding", "final norm", "sampler", "host",
    ),
}  # fmt: skip
"""Operators over tokens that share a figure."""

KINDS = {
    "layer": "Matrix products and small kernels",
    "prefill": "Prefill attention",
    "decode": "Decode attention",
    "mixed": "Mixed attention",
    "gemm": "GEMM",
}
_GROUPS = {"first": "layer", "head": "layer"}
_SAMPLED = 250


def figures(view: ProfileView) -> dict[str, list[Figure]]:
    """Figures by section: "tokens", "attention", "kernels", "roofline" and "maps"."""
    roofline = _roofline(view)
    return {
        "tokens": list(_by_tokens(view)),
        "attention": [
            figure
            for one in view.operators
            if OPERATOR_PARTS[one.operator] in ("prefill", "decode") and (figure := line_figure(view, one))
        ],
        "kernels": [
            figure
            for one in view.operators
            if OPERATOR_PARTS[one.operator] in ("gemm", "comm", "send") or (one.tp == 0 and _moe(one))
            if (figure := line_figure(view, one))
        ],
        "roofline": [roofline] if roofline else [],
        "maps": [figure for one in view.operators if (figure := map_figure(view, one))],
    }


def _moe(one: OperatorView) -> bool:
    return one.operator == "fused moe"


def _by_tokens(view: ProfileView) -> Iterator[Figure]:
    """A figure a panel and shard, a curve an operator: medians where a place was measured again."""
    shards = sorted({(one.tp, one.dtype) for one in view.operators if one.tp > 0})
    several = len({dtype for _, dtype in shards}) > 1
    for tp, dtype in shards:
        for at, (title, names) in enumerate(PANELS.items()):
            own = [o for o in view.operators if (o.tp, o.dtype) == (tp, dtype) and o.operator in names]
            curves = [_operator_curve(view, one) for one in sorted(own, key=lambda o: names.index(o.operator))]
            if curves:
                yield {
                    "id": f"tokens-{tp}-{dtype or 'any'}-{at}",
                    "kind": "lines",
                    "title": f"{title}, TP {tp}{f', {dtype}' if several else ''}",
                    "x": "tokens",
                    "curves": curves,
                }


def _operator_curve(view: ProfileView, one: OperatorView) -> dict[str, Any]:
    tokens, seconds = view.profile["tokens"][one.rows], view.profile["seconds"][one.rows]
    x = np.unique(tokens)
    most = 160
    if len(x) > most:
        x = x[np.unique(np.geomspace(1, len(x), most).astype(int) - 1)]
    y = [np.median(seconds[tokens == value]) for value in x]
    return {"name": one.operator, "x": numbers(x), "y": numbers(y)}


def _roofline(view: ProfileView) -> Figure | None:
    """FLOP/s over FLOPs a byte: a point a row, by kind of operator, under the roofs of the data sheet."""
    work = view.work
    if work is None:
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        x, y = work.flops / work.bytes, work.flops / view.profile["seconds"]
    known = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    parts = np.array([OPERATOR_PARTS[name] for name in view.profile["operator"].tolist()])
    curves = []
    for kind, title in KINDS.items():
        group = [kind, *(part for part, into in _GROUPS.items() if into == kind)]
        rows = np.flatnonzero(known & np.isin(parts, group))
        if len(rows):
            rows = rows[np.linspace(0, len(rows) - 1, min(_SAMPLED, len(rows))).astype(int)]
            curves.append({"name": title, "x": numbers(x[rows]), "y": numbers(y[rows])})
    if not curves:
        return None
    return {
        "id": "roofline",
        "kind": "roofline",
        "title": f"Rows under the roofs of the {view.profile.metadata.gpu}",
        "curves": curves,
        "peaks": numbers(np.unique(work.peak_flops[known])),
        "bandwidth": work.bandwidth,
    }


OPERATORS_NOTE = "More than 100 % of the roofline is what a cache gives to data that the data sheet has in memory."
TOKENS_NOTE = "Seconds of one layer (of a step for embedding, head and sampler) over the tokens of a step."
ATTENTION_NOTE = "A line for each of a few contexts or batches; of kernels of no model, the shape measured most."
KERNELS_NOTE = "A line for each of a few shapes or groups of GPUs."
ROOFLINE_NOTE = (
    "What a row multiplies over the bytes it must move, and how fast it does so. The lines are the data sheet's "
    "bandwidth and peak; above them, data came from a cache."
)
MAPS_NOTE = "Points are measured; where it is shaded a step of the model can lie and nothing is near."
GAPS_NOTE = "Where a step of up to 8,192 tokens or 256 sequences can lie and no point is near: there one extrapolates."
NOTES = """<dl class="notes">
<dt>Time</dt><dd>of one call on one GPU, the median of its repeats</dd>
<dt>Spread</dt><dd>the distance between the quartiles of the repeats over their median; the operator's median</dd>
<dt>Of the roofline</dt><dd>the data sheet's least time over the measured one: the median row and the best row</dd>
<dt>Kernel</dt><dd>a kernel of no model, which its shape describes; TP n: an operator of a model cut over n
GPUs</dd></dl>"""

_HEADS = ("", "", "sizes", "points", "time", "spread", "of the roofline", "best")


def body(heading: str, view: ProfileView, drawn: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Everything below the document's head."""
    parts = [
        header(heading, _metadata(view)),
        section("Operators", _table(view), OPERATORS_NOTE),
        _figures("Seconds over tokens", drawn["tokens"], TOKENS_NOTE),
        _figures("Attention", drawn["attention"], ATTENTION_NOTE),
        _figures("Kernels", drawn["kernels"], KERNELS_NOTE),
        _figures("Roofline", drawn["roofline"], ROOFLINE_NOTE),
        _figures("Where attention was measured", drawn["maps"], MAPS_NOTE),
        section("Gaps", _gaps(view.operators), GAPS_NOTE) if any(o.gaps for o in view.operators) else "",
        section("Notes", _notes(view)) if view.profile.metadata.notes else "",
        section("How to read it", NOTES),
    ]
    return "".join(parts)


def _metadata(view: ProfileView) -> list[str]:
    metadata = view.profile.metadata
    told = [metadata.gpu, metadata.model or "kernels of no model", metadata.engine, f"from {metadata.source}"]
    told += [f"measured {metadata.measured}"] if metadata.measured else []
    told += [f"licence {metadata.license}"] if metadata.license else []
    told += [f"{key.replace('_', ' ')}: {value}" for key, value in metadata.machine.items() if _short(value)]
    return [*filter(None, told), f"{len(view.profile):,} points"]


def _short(value: Any) -> bool:
    return isinstance(value, str | int | float) and 0 < len(str(value)) <= 40


def _table(view: ProfileView) -> str:
    heads = "".join(f'<th scope="col">{text}</th>' if text else "<td></td>" for text in _HEADS)
    lines = "".join(_line(one) for one in view.operators)
    return scrolling("Operators", f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>", "operators")


def _line(one: OperatorView) -> str:
    shard = shard_text(one) + (f" <span class=half>{escape(one.dtype)}</span>" if one.dtype else "")
    low, high = one.seconds
    cells = [
        f'<span class="sizes">{escape(axes_text(one))}</span>',
        f"{len(one.rows):,}",
        f"{time_text(low)} to {time_text(high)}",
        percent(one.spread),
        share_text(one.median.roofline if one.median else None),
        share_text(one.best.roofline if one.best else None),
    ]
    return (
        f'<tr><th scope="row">{escape(one.operator)}</th><td>{shard}</td>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
    )


def _figures(title: str, drawn: Sequence[dict[str, Any]], note: str) -> str:
    if not drawn:
        return ""
    return section(title, f'<div class="grid">{"".join(_figure(one) for one in drawn)}</div>', note)


def _figure(one: dict[str, Any]) -> str:
    items = "".join(f"<li>{swatch(i)}{escape(curve['name'])}</li>" for i, curve in enumerate(one.get("curves", ())))
    legend = f'<ul class="legend">{items}</ul>' if items else ""
    said = f'<p class="hint">{escape(one["message"])}</p>' if one.get("message") else ""
    return f'<figure><div class="plot" id="{escape(one["id"])}"></div>{said}{legend}</figure>'


def _gaps(operators: Sequence[OperatorView]) -> str:
    """Gaps that several operators and shards share stand once."""
    by_gap: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for one in operators:
        if one.gaps:
            here = by_gap.setdefault(tuple(map(str, one.gaps)), {})
            here.setdefault(one.operator, []).append(shard_text(one))
    lines = "".join(_gap_line(texts, who) for texts, who in by_gap.items())
    heads = '<thead><tr><th scope="col">nothing measured at</th><th scope="col">operators</th></tr></thead>'
    return scrolling("Gaps", f"{heads}<tbody>{lines}</tbody>", "gaps")


def _gap_line(texts: Sequence[str], owner: Mapping[str, Sequence[str]]) -> str:
    where = "<br>".join(map(escape, texts))
    names = "; ".join(f"{name} ({', '.join(shards)})" for name, shards in owner.items())
    return f'<tr><td>{where}</td><td class="who">{escape(names)}</td></tr>'


def _notes(view: ProfileView) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in view.profile.metadata.notes)
    return f'<ul class="said">{items}</ul>'


def write_profile_html(path: Path | str, view: ProfileView, *, heading: str = "") -> None:
    """A self-contained page of a profile; the same one gives the same bytes.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    heading, drawn = heading or view.profile.metadata.name or "A profile", figures(view)
    text = document(
        heading,
        body(heading, view, drawn),
        styles=asset("page.css") + asset("profile/profile.css"),
        scripts=[plotly_js(), asset("look.js"), asset("profile/profile.js")],
        data=json.dumps(drawn, separators=(",", ":"), allow_nan=False, ensure_ascii=False),
    )
    write_whole(path, text.encode())


VERSION = 1


def profile_json(view: ProfileView) -> str:
    """The text of a JSON file of what is in a profile."""
    made = {
        "format": "lengthwise.profile_view",
        "version": VERSION,
        "metadata": dataclasses.asdict(view.profile.metadata),
        "rows": len(view.profile),
        "operators": [_operator(one) for one in view.operators],
    }
    return _text(made)


def check_json(found: ProfileCheck) -> str:
    """The text of a JSON file of what was compared and what moved."""
    made = {
        "format": "lengthwise.profile_check",
        "version": VERSION,
        "changed": len(found.changed),
        **dataclasses.asdict(found),
    }
    return _text(made)


def _operator(view: OperatorView) -> dict[str, Any]:
    return {
        "operator": view.operator,
        "tp": view.tp,
        "dtype": view.dtype,
        "points": len(view.rows),
        "axes": view.axes,
        "seconds": view.seconds,
        "spread": view.spread,
        "gaps": [{name: [low, high] for name, low, high in gap.axes} for gap in view.gaps],
        "median": None if view.median is None else dataclasses.asdict(view.median),
        "best": None if view.best is None else dataclasses.asdict(view.best),
    }


def _text(made: dict[str, Any]) -> str:
    return json.dumps(plain(made), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
