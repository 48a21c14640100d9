"""Our planner over the paper's greedy, over all cases of the studies that are kept in results: measures nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lengthwise.apps.plan.evaluate import mean_of

RESULTS = Path(__file__).parent / "results" / "apps.json"
GREEDY = "samullm"


def figures(_: Path, fast: bool) -> dict[str, Any]:  # noqa: ARG001 - there is nothing to shorten
    """The geometric mean of gains end to end, its interval over cases, and the lowest of them."""
    rows = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]
    gains = {
        f"{row['name'].split('.')[1]}: {case['case']}": case["methods"][GREEDY]["gain"]
        for row in rows
        if row["name"].endswith(".cases")
        for case in row["details"]["cases"]
    }
    if not gains:
        raise FileNotFoundError("no studies are kept: run them with --save")
    logs = mean_of([math.log(gain) for gain in gains.values()])
    least = min(gains, key=lambda one: gains[one])
    return {
        "apps.better_over_greedy": {
            "value": math.exp(logs.value),
            "ci": (math.exp(logs.value - logs.half_width), math.exp(logs.value + logs.half_width)),
            "details": {"gains": gains, "mean": "geometric, over cases"},
        },
        "apps.better_over_greedy_lowest": {"value": gains[least], "details": {"case": least}},
    }
