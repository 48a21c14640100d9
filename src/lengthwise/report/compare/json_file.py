"""The machine-readable comparison.

Schema version 1::

    {"format": "lengthwise.comparison", "version": 1, "paired": bool, "level": number, "draws": int,
     "warmup_s": number, "slo": null or {limit: seconds}, "doubts": [str],
     "a", "b": {"name", "source", "span_s", "counts": the fields of lengthwise.metrics.Counts,
                "client": null or {"mean_s", "p50_s", "max_s"}: from when a request was due until it was sent},
     "errors": {"ttft.p95", ...: {"a", "b", "error", "low", "high"}},
     "distances": {metric: the other fields of lengthwise.metrics.MetricDistance}}

Keys are only ever added within a version. Times are in seconds, errors shares of b; what is not known is null.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from lengthwise.metrics import Comparison, MetricError
from lengthwise.report.json_file import plain
from lengthwise.schema.files import write_whole

VERSION = 1


def write_compare_json(path: Path | str, comparison: Comparison) -> None:
    """A JSON file with every number of a comparison, under stable keys (see the module).

    Raises:
        OutputError: The file cannot be written.
    """
    text = json.dumps(compare_dict(comparison), indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode())


def compare_dict(comparison: Comparison) -> dict[str, Any]:
    """A comparison as what JSON knows."""
    distances = {one.metric: dataclasses.asdict(one) for one in comparison.distances}
    for one in distances.values():
        del one["metric"]
    made: dict[str, Any] = plain(
        {
            "format": "lengthwise.comparison",
            "version": VERSION,
            "paired": comparison.paired,
            "level": comparison.level,
            "draws": comparison.draws,
            "warmup_s": comparison.warmup_s,
            "slo": comparison.slo.limits if comparison.slo else None,
            "doubts": list(comparison.doubts),
            "a": dataclasses.asdict(comparison.a),
            "b": dataclasses.asdict(comparison.b),
            "errors": {one.key: _error(one) for one in comparison.errors},
            "distances": distances,
        }
    )
    return made


def _error(one: MetricError) -> dict[str, float]:
    return {"a": one.a, "b": one.b, "error": one.error, "low": one.low, "high": one.high}
