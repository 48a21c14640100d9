"""What becomes a row of ``_exegpt_live``: schedules as expected beside what engines did of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lengthwise.schedule import Controls

RRA, GATEWAY, STOCK = "rra", "gateway", "stock"
"""The schedule inside the engine; before an engine with its own scheduler; as many requests without a schedule."""


@dataclass(frozen=True)
class Expected:
    """A schedule, and what the estimator says of it."""

    name: str
    controls: Controls
    throughput_rps: float
    latency_s: float
    latency_high_s: float
    decode_batch: float
    cycle_s: float
    encode_s: float
    decode_s: float

    @property
    def under_way(self) -> int:
        """Requests in a decode batch, rounded."""
        return max(1, round(self.decode_batch))

    @property
    def requested(self) -> int:
        """Requests of clients at a time: an encoding's worth always waits."""
        return 2 * self.under_way + 4 * self.controls.encode_batch


def rows(
    chosen: Sequence[Expected],
    runs: dict[str, list[dict[str, Any]]],
    simulated: dict[str, dict[str, float]],
    notes: dict[str, Any],
) -> dict[str, Any]:
    """A row a figure: the worst schedule's error of the mean over repeats, with all that made it."""
    by_name: dict[str, Any] = {}
    errors: dict[str, list[float]] = {"throughput": [], "latency": [], "decode_batch": []}
    columns = {"throughput": "throughput_rps", "latency": "latency_s", "decode_batch": "decode_batch"}
    for one in chosen:
        mine = runs[f"{one.name} {RRA}"]
        signed = {}
        for what, column in columns.items():
            mean = statistics.fmean(run[column] for run in mine)
            signed[what] = getattr(one, column) / mean - 1
            errors[what].append(signed[what])
        by_name[one.name] = {
            "expected": asdict(one) | {"controls": asdict(one.controls)},
            "seen": _spread(mine),
            "seen_of_gateway": _spread(runs[f"{one.name} {GATEWAY}"]),
            "stock_as_many_under_way": _spread(runs[f"{one.name} {STOCK}"]),
            "simulated": simulated[one.name],
            "expected_over_seen": {what: round(1 + error, 4) for what, error in signed.items()},
        }
    exact = [run["exact_phases"] for one in chosen for run in runs[f"{one.name} {RRA}"]]
    gains = {
        one.name: statistics.fmean(
            a["throughput_rps"] / b["throughput_rps"]
            for a, b in zip(runs[f"{one.name} {RRA}"], runs[f"{one.name} {STOCK}"], strict=True)
        )
        for one in chosen
    }
    found: dict[str, Any] = {
        f"exegpt.live.{what}_error": {
            "value": round(max(map(abs, told)), 4),
            "unit": "relative",
            "target": 0.05 if what != "latency" else 0.1,
            "better": "lower",
            "details": {"signed": {one.name: round(e, 4) for one, e in zip(chosen, told, strict=True)}},
        }
        for what, told in errors.items()
    }
    found["exegpt.live.exact_phases"] = {
        "value": round(min(exact), 4),
        "unit": "share",
        "target": 1.0,
        "better": "higher",
        "details": {"phases": sum(run["phases"] for one in chosen for run in runs[f"{one.name} {RRA}"])},
    }
    found["exegpt.live.over_stock"] = {
        "value": round(max(gains.values()), 4),
        "unit": "times",
        "details": {name: round(gain, 4) for name, gain in gains.items()},
    }
    found["exegpt.live.schedules"] = {
        "value": len(chosen),
        "unit": "schedules",
        "details": {"by_name": by_name, "repeats": len(runs[f"{chosen[0].name} {RRA}"])} | notes,
    }
    return found


def _spread(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and range over repeats of every number."""
    return {
        name: {
            "mean": round(statistics.fmean(run[name] for run in runs), 5),
            "range": [round(min(run[name] for run in runs), 5), round(max(run[name] for run in runs), 5)],
        }
        for name in runs[0]
    }
