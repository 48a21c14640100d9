"""The curve of a baseline system with its schedules as columns."""

from __future__ import annotations

import numpy as np

from lengthwise import schedule

NAMES = {"pp": "stages", "batch": "prefill_batch", "first_s": "encode_s", "residents": "decode_batch"}


class CurveColumns:
    """A curve; other attributes are columns of its rows."""

    def __init__(self, of):
        self.best, self.front, self.configurations = of.best, of.front, len(of.rows)
        self.rows, self.intervals_rps = of.rows, of.intervals_rps
        cuts = np.array([row.prefill_cut or (0, 0, 0) for row in of.rows]).reshape(-1, 3)
        self.prefill_tp, self.prefill_pp, self.prefill_replicas = cuts.T

    def __getattr__(self, name):
        if name == "fits":
            return self.throughput_rps > 0
        return np.array([getattr(row, NAMES.get(name, name)) for row in self.rows])


def curve(*args, **kwargs):
    """Return the results of a system as columns."""
    return CurveColumns(schedule.curve(*args, **kwargs))
