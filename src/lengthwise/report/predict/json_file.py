"""The scores of a predictor, machine-readable.

Schema version 1::

    {"format": "lengthwise.prediction", "version": 1,
     "predictor": its training facts,
     "evaluations": [the fields of lengthwise.predict.evaluate.Evaluation by their names, without
                     "shown"; an estimate is {"value": number | null, "half_width": number | null};
                     "calibration" is {"level": [...], "share": [...]}]}

Keys are only ever added within a version. What is not known is null.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.predict.evaluate import Evaluation
from lengthwise.report.json_file import plain

VERSION = 1


def predict_json(found: Sequence[Evaluation], facts: Mapping[str, Any] | None = None) -> str:
    """The text of a JSON file with everything that was scored, under stable keys (see the module)."""
    made = {
        "format": "lengthwise.prediction",
        "version": VERSION,
        "predictor": dict(facts or {}),
        "evaluations": [_evaluation(one) for one in found],
    }
    return json.dumps(plain(made), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _evaluation(one: Evaluation) -> dict[str, Any]:
    fields = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name != "shown"}
    level, share = one.calibration
    return {
        **fields,
        "scores": {name: dataclasses.asdict(e) for name, e in one.scores.items()},
        "windows": [dataclasses.asdict(w) for w in one.windows],
        "calibration": {"level": level.tolist(), "share": share.tolist()},
        "latency_ms": {str(n): ms for n, ms in one.latency_ms.items()},
    }
