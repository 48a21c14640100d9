"""Schedules of static batches and of a baseline system's curve as columns."""

from __future__ import annotations

import numpy as np

from lengthwise import schedule

NAMES = {"pp": "stages", "batch": "prefill_batch", "residents": "decode_batch"}
CUT = ("prefill_tp", "prefill_pp", "prefill_replicas")


class Columns:
    """Results with rows; attributes that they lack are columns of the rows."""

    def __init__(self, of):
        self.of = of

    def __getattr__(self, name):
        if hasattr(self.of, name):
            return getattr(self.of, name)
        if name in CUT:
            cuts = np.array([row.prefill_cut or (0, 0, 0) for row in self.rows]).reshape(-1, 3)
            return cuts[:, CUT.index(name)]
        if name == "fits":
            return self.throughput_rps > 0
        return np.array([getattr(row, NAMES.get(name, name)) for row in self.rows])


def curve(*args, **kwargs):
    """Return the results of a system."""
    return Columns(schedule.curve(*args, **kwargs))


def static_batches(estimator):
    """Return the static batches of an estimator's task."""
    return Columns(schedule.static_batches(estimator))
