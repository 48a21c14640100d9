"""What is counted of requests, and what Prometheus is told of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lengthwise.gateway.decisions import Statistics
from lengthwise.gateway.follow import Followed
from lengthwise.gateway.listener import Listener
from lengthwise.gateway.phasing import Phases
from lengthwise.gateway.request import Outcome, Refusal, Request
from lengthwise.gateway.telemetry import _families as families
from lengthwise.gateway.telemetry import following
from lengthwise.gateway.telemetry.histogram import GAPS_S, LAGS_S, LENGTHS, LOG_RATIOS, WAITS_S, Histogram
from lengthwise.gateway.telemetry.labels import Labels
from lengthwise.gateway.telemetry.phases import PhaseCounts
from lengthwise.gateway.telemetry.regret import Regret
from lengthwise.gateway.telemetry.row import Row
from lengthwise.schema.errors import MissingExtraError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MOST_TENANTS = 50
MOST_MODELS = 50


class OfModel:
    """What is counted of one model."""

    __slots__ = (
        "actual", "gap_s", "jct_s", "log_ratio", "output_tokens", "predicted", "prompt_tokens", "queue_s", "ttft_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ttft_s, self.queue_s, self.jct_s = Histogram(WAITS_S), Histogram(WAITS_S), Histogram(WAITS_S)
        self.gap_s = Histogram(GAPS_S)
        self.predicted, self.actual = Histogram(LENGTHS), Histogram(LENGTHS)
        self.log_ratio = Histogram(LOG_RATIOS)
        self.prompt_tokens = self.output_tokens = 0


class Metrics(Listener):
    """Counts, and collects for a registry of its own.

    The queue, the workers and the regret are read when somebody asks, by the functions that are given.

    Args:
        statistics: The scheduler now; None tells nothing of it.
        regret: The running estimate against FCFS.
        tenants: So many names of tenants at most; further ones are "other".
        mode: The order's mode.
        phases: The schedule that engines keep; None: none.
    """

    def __init__(
        self,
        statistics: Callable[[], Statistics] | None = None,
        regret: Regret | None = None,
        *,
        tenants: int = MOST_TENANTS,
        mode: str = "",
        phases: Phases | None = None,
    ) -> None:
        self.statistics, self.regret, self.mode = statistics, regret or Regret(), mode
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.forecasts: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.by_model: dict[str, OfModel] = {}
        self.phases = PhaseCounts(phases)
        self.lag_s = Histogram(LAGS_S)
        self.journal: Callable[[], tuple[int, int]] | None = None
        self.following: Callable[[], Followed] | None = None
        self._models, self._tenants = Labels(MOST_MODELS), Labels(tenants)

    # What happens to requests:

    def gaps(self, model: str) -> Histogram:
        """Where the times between tokens of a model are counted."""
        return self._of(model).gap_s

    def arrived(self, request: Request) -> None:  # noqa: D102 - as Listener
        self.forecasts[request.forecast.source] += 1
        self._of(request.model)

    def refused(self, reason: str, refusal: Refusal, tenant: int, model: str) -> None:  # noqa: D102
        del refusal
        self.refused_by(reason, str(tenant), model)

    def refused_by(self, reason: str, tenant: str, model: str) -> None:
        """A request of a tenant by name was not let in."""
        self.refusals[reason] += 1
        self.requests[Outcome.REFUSED.value, self._models.known(model), self._tenants.of(tenant)] += 1

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        del worker, now_s
        if request.cached_tokens:
            self.counts["prefix_hits"] += 1
            self.counts["prefix_tokens"] += request.cached_tokens

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        self._of(request.model).ttft_s.add(now_s - request.arrival_s)

    def returned(self, request: Request, why: str, now_s: float) -> None:  # noqa: D102
        del now_s
        self.counts[why] += 1
        self.counts["resumed_tokens"] += request.generated_tokens

    def over(self, row: Row) -> None:
        """A request is over."""
        label = self._models.of(row.model)
        self.requests[row.outcome, label, self._tenants.of(row.tenant)] += 1
        of = self._of(row.model)
        if row.worker:
            of.queue_s.add(row.waited_s)
        of.prompt_tokens += row.prompt_tokens
        of.output_tokens += row.output_tokens
        if row.outcome != Outcome.FINISHED:
            return
        of.jct_s.add(row.jct_s)
        if row.output_tokens >= 1:
            of.predicted.add(row.predicted_tokens)
            of.actual.add(row.output_tokens)
            of.log_ratio.add(math.log(max(row.predicted_tokens, 1.0) / row.output_tokens))

    def _of(self, model: str) -> OfModel:
        label = self._models.of(model)
        of = self.by_model.get(label)
        if of is None:
            of = self.by_model[label] = OfModel()
        return of

    # What Prometheus is told:

    def collect(self) -> Iterator[Any]:
        """All families now."""
        yield from families.of_requests(self)
        yield from families.of_models(self.by_model)
        yield from families.of_regret(self.regret)
        yield from families.of_gateway(self)
        yield from self.phases.families()
        if self.following is not None:
            yield from following.families(self.following())
        if self.statistics is not None:
            yield from families.of_scheduler(self.statistics())

    def registry(self) -> CollectorRegistry:
        """A registry of these, and of the process.

        Raises:
            MissingExtraError: prometheus-client is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
        except ImportError as error:
            raise MissingExtraError("lengthwise serve", "gateway") from error
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        return registry
