"""Seconds of single visits of a stage, from the cost tables of one degree."""

from __future__ import annotations

from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.stage_costs import packed_tables, visits_s


def prefill_visit_s(tables, task, seqs, layers, *, first=False, last=False):
    """Return [n] seconds to prefill ``seqs`` prompts of the task."""
    return visits_s(packed_tables(tables, task), seqs, 0.0, (layers, first, last), prefill=True)


def decode_visit_s(tables, task, seqs, kv_tokens, layers, *, first=False, last=False):
    """Return [n] seconds to decode one token of ``seqs`` sequences over ``kv_tokens``."""
    return visits_s(packed_tables(tables, task), seqs, kv_tokens, (layers, first, last), prefill=False)


def estimate(controls, *given):
    """Return a row of estimates per schedule, of an estimator with these arguments."""
    return Estimator(*given).estimate(controls)
