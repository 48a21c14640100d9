"""Phases of mode rra as they were, and what was planned, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from lengthwise.gateway.decisions import Phase
from lengthwise.gateway.phasing import Phases
from lengthwise.gateway.telemetry.histogram import WAITS_S, Histogram
from lengthwise.gateway.telemetry.labels import Labels

MOST_WORKERS = 200
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Of batches and phases."""
_HISTOGRAMS = (
    ("encode_batch", SIZES, "phase_encode_batch_requests", "New requests of an encoding (B_E)"),
    ("decode_batch", SIZES, "phase_decode_batch_requests", "Requests at the engine after an encoding (B_D)"),
    ("left_batch", SIZES, "phase_left_batch_requests", "Requests at the engine at the end of a phase"),
    ("decode_steps", SIZES, "phase_decode_steps", "Decode iterations of a phase, as tokens tell (N_D)"),
    ("seconds", WAITS_S, "phase_seconds", "From one encoding to the next, or to the engine's idling"),
)


class PhaseCounts:
    """What phases were, by worker.

    Attributes:
        plan: The schedule that is kept; None: none.
    """

    def __init__(self, plan: Phases | None) -> None:
        self.plan = plan
        self._workers = Labels(MOST_WORKERS)
        self._ended: Counter[tuple[str, str]] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._overdue: Counter[str] = Counter()
        self._of: dict[str, dict[str, Histogram]] = {}

    def phase(self, phase: Phase) -> None:
        """One is over."""
        worker = self._workers.of(phase.worker)
        self._ended[worker, phase.why] += 1
        self._overdue[worker] += phase.overdue
        self._prompt_tokens[worker] += phase.prompt_tokens
        of = self._of.get(worker)
        if of is None:
            of = self._of[worker] = {name: Histogram(edges) for name, edges, _, _ in _HISTOGRAMS}
        for name in ("encode_batch", "decode_batch", "left_batch", "decode_steps"):
            of[name].add(getattr(phase, name))
        of["seconds"].add(phase.ended_s - phase.begun_s)

    def families(self) -> Iterator[Any]:
        """All of it, where a schedule is kept."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        if self.plan is None:
            return
        plan = GaugeMetricFamily("lengthwise_phase_plan", "The schedule that engines keep", labels=("of",))
        for name, value in asdict(self.plan).items():
            if value is not None:
                plan.add_metric((name,), float(value))
        yield plan
        ended = CounterMetricFamily(
            "lengthwise_phases", "Phases that are over, by what ended them", labels=("worker", "ended")
        )
        for (worker, why), count in self._ended.items():
            ended.add_metric((worker, why), float(count))
        yield ended
        for name, what, counts in (
            ("phase_prompt_tokens", "Prompt tokens of all encodings", self._prompt_tokens),
            ("phase_overdue", "Requests sent in the midst of a phase after max_wait_s", self._overdue),
        ):
            family = CounterMetricFamily(f"lengthwise_{name}", what, labels=("worker",))
            for worker, count in counts.items():
                family.add_metric((worker,), float(count))
            yield family
        for key, _, name, what in _HISTOGRAMS:
            shown = HistogramMetricFamily(f"lengthwise_{name}", what, labels=("worker",))
            for worker, of in self._of.items():
                shown.add_metric((worker,), of[key].buckets(), of[key].sum)
            yield shown
