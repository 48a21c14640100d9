"""How far rates strain the limits: runs of several seeds, looked at together."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import t_quantile
from lengthwise.schema.deployment import Deployment
from lengthwise.search.bounds import ceiling
from lengthwise.search.crossing import LEAST_STRAIN
from lengthwise.search.limits import Promises
from lengthwise.search.load import Load
from lengthwise.search.window import observe

Floats = npt.NDArray[np.float64]
Map = Callable[[Callable[[int], list[float]], Iterable[int]], Iterable[list[float]]]

GROWTH = 0.005
"""A queue that keeps this share of what arrives, beyond chance, grows for ever."""

_LEAST_SLOPE = 1.0


@dataclass
class Effort:
    """What was spent: runs of the engine, and requests in them."""

    simulations: int = 0
    requests: int = 0


@dataclass
class Trials:
    """How far rates strain the limits, pooled over seeds; keeps every seed's strains by rate."""

    deployment: Deployment
    load: Load
    promises: Promises
    requests: int
    seeds: range
    effort: Effort
    each: Map = map
    strains: dict[float, Floats] = field(default_factory=dict)

    def strain(self, rate_rps: float) -> float:
        """The largest strain of any limit, and of the queue's growth; above 1 one breaks."""
        if rate_rps not in self.strains:
            one = partial(self._one, rate_rps)
            self.strains[rate_rps] = np.array(list(self.each(one, self.seeds)))
            self.effort.simulations += len(self.seeds)
            self.effort.requests += len(self.seeds) * self.requests
        return float(self._pooled(rate_rps).max())

    def ceiling_rps(self) -> float:
        """The rate that no schedule beats on any seed's requests, these very ones."""
        each = (self.load.at(seed, self.requests, 1.0) for seed in self.seeds)
        return max(ceiling(self.deployment, requests, self.promises.limits).rate_rps for requests in each)

    def _one(self, rate_rps: float, seed: int) -> list[float]:
        workload = self.load.at(seed, self.requests, rate_rps)
        window = observe(workload, self.deployment, seed, sums=self.promises.needs_sums)
        return [*self.promises.strains(window).values(), window.queue_growth()]

    def _pooled(self, rate_rps: float) -> Floats:
        """Strains of the limits, means over seeds; last that of the queue's growth."""
        means: Floats = self.strains[rate_rps].mean(axis=0)
        means[-1] /= GROWTH + self._noise(rate_rps)
        return means

    def _noise(self, rate_rps: float) -> float:
        """What the queue may grow by chance: two standard errors, from the seeds or, of one, as counts vary."""
        growth, n = self.strains[rate_rps][:, -1], len(self.seeds)
        if n > 1:
            return 2 * float(growth.std(ddof=1)) / math.sqrt(n)
        return 6 * math.sqrt(max(float(growth[0]), 0.0) * self.requests + 1) / self.requests

    @property
    def binds(self) -> str:
        """The metric that broke at the lowest rate that broke any; "throughput": the queue grows."""
        broken = [rate for rate in self.strains if self._pooled(rate).max() > 1]
        names = [*(limit.metric for limit in self.promises.limits), "throughput"]
        return names[int(self._pooled(min(broken)).argmax())] if broken else "throughput"

    def spread(self, rate_rps: float, level: float) -> float:
        """Half-width of the crossing's interval: the seeds' spread of the strain there, over its slope."""
        if len(self.seeds) < 2:
            return math.nan
        if len(self.strains) < 2:
            return 0.0  # the ceiling holds: no limit is crossed
        nearest = min(self._around(rate_rps), key=lambda r: abs(r - rate_rps))
        pooled = max(float(self._pooled(nearest).max()), LEAST_STRAIN)
        return self.doubt(nearest, level) / pooled / self.slope(rate_rps) * rate_rps

    def forgiven(self, rate_rps: float) -> float:
        """Share of the rate by which a queue may grow unseen, where its growth is what binds."""
        if self.binds != "throughput" or len(self.strains) < 2:
            return 0.0
        return GROWTH + max(self._noise(rate) for rate in self._around(rate_rps))

    def slope(self, rate_rps: float) -> float:
        """How steeply the strain rises at a rate, logarithm by logarithm; 0 where only one was tried."""
        if len(self.strains) < 2:
            return 0.0
        low, high = self._around(rate_rps)
        means = [max(float(self._pooled(r).max()), LEAST_STRAIN) for r in (low, high)]
        return max(math.log(means[1] / means[0]) / math.log(high / low), _LEAST_SLOPE)

    def _around(self, rate_rps: float) -> tuple[float, float]:
        """The nearest rates below and above that were tried."""
        rates = sorted(self.strains)
        at = min(max(bisect(rates, rate_rps) - 1, 0), len(rates) - 2)
        return rates[at], rates[at + 1]

    def doubt(self, rate_rps: float, level: float) -> float:
        """Half-width of the pooled strain at a rate that was tried; 0 for a single seed."""
        strains, n = self.strains[rate_rps], len(self.seeds)
        if n < 2:
            return 0.0
        worst = int(self._pooled(rate_rps).argmax())
        half = t_quantile(level, n - 1) * float(strains[:, worst].std(ddof=1)) / math.sqrt(n)
        return half if worst < strains.shape[1] - 1 else half / (GROWTH + self._noise(rate_rps))
