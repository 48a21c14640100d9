"""How much of the steps' time a host takes: a GPU's steps are its kernels, most of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.records import Records


def host_share(simulations: Sequence[Records], tables: CostTables) -> float:
    """The host's seconds over those of all steps that were simulated with ``tables``; 0 where none were kept."""
    host_s = steps_s = 0.0
    for records in simulations:
        if (steps := records.steps) is None:
            continue
        seqs = np.minimum(steps.decode_seqs + steps.prefill_seqs, len(tables.host_s) - 1)
        host_s += float(tables.host_s[seqs].sum())
        steps_s += float((steps.end_s - steps.start_s).sum())
    return min(1.0, host_s / steps_s) if steps_s > 0 else 0.0
