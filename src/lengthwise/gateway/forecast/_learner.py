"""Learns from the lengths that finish here, model by model."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import islice
from typing import Any

import numpy as np

from lengthwise.gateway.forecast._belief import Belief
from lengthwise.gateway.forecast._learned import Learned
from lengthwise.gateway.forecast._lengths import UNKNOWN, Lengths
from lengthwise.gateway.request import Floats

MOST_MODELS = 64
_RANKED, _SHOWN = 256, 16


class Learner:
    """Corrections by model, what stands in by model, and how well the order was predicted.

    Args:
        every: Finished requests of a model between two corrections.
        most_models: Of more, the one that was longest without a finished request is forgotten.
    """

    def __init__(self, every: int, most_models: int = MOST_MODELS) -> None:
        self._every, self._most = every, most_models
        self._models: OrderedDict[str, tuple[Learned, Lengths]] = OrderedDict()
        self._all = Lengths(every)
        self._ranked: deque[tuple[float, int]] = deque(maxlen=_RANKED)
        self.finished = 0

    def corrected(self, model: str, raw: Floats) -> Floats:
        """[25] the predictor's quantiles, as this model's outputs have them; a new model's as they are."""
        known = self._models.get(model)
        return raw if known is None else known[0].corrected(raw)

    def prior(self, model: str) -> Floats:
        """[25] lengths of this model's outputs, else of all, else of what is known of none."""
        known = self._models.get(model)
        if known is not None and known[1].row is not None:
            return known[1].row
        return UNKNOWN if self._all.row is None else self._all.row

    def finished_with(self, model: str, belief: Belief, tokens: int, *, cut: bool) -> bool:
        """Learns from an output that ended by itself or at its limit; whether lengths have drifted with it."""
        learned, lengths = self._of(model)
        self.finished += 1
        lengths.add(tokens, cut=cut)
        self._all.add(tokens, cut=cut)
        if belief.raw is None or belief.whole is None:
            return False
        if not cut:
            self._ranked.append((belief.first_tokens, tokens))
        return learned.finished_with(belief.raw, belief.whole, tokens, cut=cut)

    def tau(self) -> float | None:
        """Kendall's tau-b of predicted and true lengths over the last outputs; None before there are some."""
        if len(self._ranked) < 2:
            return None
        said, true = np.array(self._ranked).T
        rows, columns = np.triu_indices(len(said), 1)
        a, b = np.sign(said[rows] - said[columns]), np.sign(true[rows] - true[columns])
        spread = float(np.sqrt((a**2).sum() * (b**2).sum()))
        return float((a * b).sum()) / spread if spread else None

    def state(self) -> dict[str, Any]:
        """For people: the models that finished last first."""
        latest = islice(reversed(self._models.items()), _SHOWN)
        return {
            "finished": self.finished,
            "tau": self.tau(),
            "tau_of": len(self._ranked),
            "models": {name: learned.state() for name, (learned, _) in latest},
        }

    def _of(self, model: str) -> tuple[Learned, Lengths]:
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = (Learned(self._every), Lengths(self._every))
            if len(self._models) > self._most:
                self._models.popitem(last=False)
        self._models.move_to_end(model)
        return known
