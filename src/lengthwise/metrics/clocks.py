"""Whether the times of a run can be those of one clock."""

from __future__ import annotations

import numpy as np

from lengthwise.schema.records import RequestRecords

END_SLACK_S = 1.0


def clock_doubt(r: RequestRecords, end_s: float) -> str:
    """Words on times that cannot be, of a clock that was set or of two that disagree; "" where all can."""
    with np.errstate(invalid="ignore"):
        wrong = (
            (r.first_token_s < r.arrival_s)
            | (r.finished_s < r.first_token_s)
            | (r.finished_s > end_s + END_SLACK_S)
        )
    if not wrong.any():
        return ""
    return (
        f"clocks disagree: {int(wrong.sum()):,} requests have a first token before they arrived, or end before it "
        "or after the run"
    )
