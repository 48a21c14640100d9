"""What the figures show: curves as plain data, which the page's script draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from lengthwise.schema.estimate import Estimate
from lengthwise.theory import ORDERS, MultiBinStudy, QueueStudy

Figure = dict[str, Any]
SLOWEST = {"fcfs": 0, "sjf": 1, "spjf": 4, "sprpt": 3, "srpt": 2}
"""Colours of the orders."""


def figures(study: MultiBinStudy | QueueStudy) -> list[Figure]:
    """All figures of a study."""
    return _of_bins(study) if isinstance(study, MultiBinStudy) else _of_queue(study)


def _of_bins(study: MultiBinStudy) -> list[Figure]:
    bins = [row.bins for row in study.rows]
    ticks = {"label": "bins, log scale", "log": True, "ticks": bins}
    drawn = [
        _figure(
            "throughput", "Throughput by number of bins", ticks, {"label": "requests a second"},
            [
                _line("theory", 0, bins, [row.throughput_rps for row in study.rows]),
                _marks("simulated", 0, bins, [row.simulated_rps for row in study.rows]),
            ],
            [(study.capacity_rps, "capacity")]
            + ([(study.target_rps, "target")] if math.isfinite(study.target_rps) else []),
        )
    ]  # fmt: skip
    if math.isfinite(study.rate_rps):
        drawn.append(
            _figure(
                "latency", "Latency without a queue, by number of bins", ticks, {"label": "seconds"},
                [
                    _line("theory", 1, bins, [row.latency_s for row in study.rows]),
                    _marks("simulated", 1, bins, [row.simulated_latency_s for row in study.rows]),
                ],
            )
        )  # fmt: skip
    return [*drawn, *_saturation(study), *_robustness(study)]


def _saturation(study: MultiBinStudy) -> list[Figure]:
    if study.saturation is None:
        return []
    rates, found = study.saturation
    limits = {row.bins: row.throughput_rps for row in study.rows}
    curves = []
    for i, (bins, points) in enumerate(found.items()):
        curves.append(_line(_bins(bins), i, rates, [min(rate, limits[bins]) for rate in rates]))
        curves.append(_marks(_bins(bins), i, rates, [Estimate(p.value) for p in points]) | {"silent": True})
    x, y = {"label": "arrivals, requests a second"}, {"label": "served a second"}
    return [
        _figure("saturation", "Throughput by arrival rate", x, y, curves, [(study.capacity_rps, "capacity")])
    ]


def _robustness(study: MultiBinStudy) -> list[Figure]:
    if study.robustness is None:
        return []
    chances, found = study.robustness
    curves = [_line(_bins(bins), i, chances, rates) for i, (bins, rates) in enumerate(found.items())]
    x = {"label": "chance of each neighbouring bin"}
    return [_figure("robustness", "Throughput under wrong bins", x, {"label": "requests a second"}, curves)]


def _of_queue(study: QueueStudy) -> list[Figure]:
    x = {"label": "load"}
    sojourns = [_order(study, name, [one.mean_s for one in study.orders[name]]) for name in SLOWEST]
    slower = [_order(study, name, [one.slowdown for one in study.orders[name]]) for name in SLOWEST]
    shown = list(study.kept)[:: max(1, len(study.kept) // 4)]
    kept = [_line(f"load {load:g}", i, study.sigmas, study.kept[load]) for i, load in enumerate(shown)]
    waiting = [
        _line(f"load {load:g}", i, study.sigmas, study.kept_unpreempted[load]) for i, load in enumerate(shown)
    ]
    error = {"label": "error of the predictor, sd of ln(predicted / true)"}
    share = {"label": "of the gap from FCFS to SRPT", "format": ".0%"}
    return [
        _figure(
            "sojourn",
            "Mean time from arrival to end",
            x,
            {"label": "seconds, log scale", "log": True},
            sojourns,
        ),
        _figure(
            "slowdown",
            "Mean slowdown",
            x,
            {"label": "time over service time, log scale", "log": True},
            slower,
        ),
        _figure("kept", "What a predictor keeps, preemptive", error, share, kept),
        _figure("kept-waiting", "What a predictor keeps, not preemptive", error, share, waiting),
    ]


def _order(study: QueueStudy, name: str, values: Sequence[float]) -> Figure:
    curve = _line(ORDERS[name], SLOWEST[name], study.loads, values)
    return curve | {"dash": "dash" if name in ("spjf", "sprpt") else "solid"}


def _figure(
    name: str,
    title: str,
    x: dict[str, Any],
    y: dict[str, Any],
    curves: Sequence[Figure],
    levels: Sequence[tuple[float, str]] = (),
) -> Figure:
    drawn = [curve for curve in curves if any(value is not None for value in curve["y"])]
    lines = [{"y": _short([value])[0], "text": text} for value, text in levels]
    return {"id": name, "title": title, "x": x, "y": y, "curves": drawn, "levels": lines}


def _line(name: str, series: int, x: Iterable[float], y: Iterable[float]) -> Figure:
    return {"name": name, "series": series, "mode": "lines", "x": _short(x), "y": _short(y)}


def _marks(name: str, series: int, x: Iterable[float], y: Sequence[Estimate]) -> Figure:
    """Simulated points with their intervals."""
    values, halves = _short(e.value for e in y), _short(e.half_width for e in y)
    return {"name": name, "series": series, "mode": "markers", "x": _short(x), "y": values, "half": halves}


def _bins(count: int) -> str:
    return "1 bin" if count == 1 else f"{count} bins"


def _short(values: Iterable[float]) -> list[float | None]:
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in map(float, values)]
