"""Cost tables from fitted operators; what was not measured comes from the roofline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lengthwise.cost._efficiency import Work
from lengthwise.cost._operators import Operators
from lengthwise.cost._roofline_errors import roofline_errors, with_front_error
from lengthwise.cost.estimators._judge import Judged
from lengthwise.cost.estimators._model_points import shard_points
from lengthwise.cost.estimators._target import NAMES, Target
from lengthwise.cost.roofline import LARGEST_KV_TOKENS, HostOverhead
from lengthwise.schema.cost_tables import CostTables, Floats, PartError, grid_axis
from lengthwise.schema.profile import OPERATOR_PARTS

_IN_ATTENTION = "kv write"
_PARTS = ("layer", "comm", "first", "send", "head", "host", "prefill", "decode")


@dataclass
class _Part:
    """A part's seconds on its axes, and whose they are."""

    seconds: Floats
    of: list[tuple[float, float]] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)

    def add(self, seconds: Floats, log_sd: float, filled: str = "") -> None:
        self.seconds = self.seconds + seconds
        self.of.append((float(seconds.mean()), log_sd))
        if filled:
            self.filled.append(filled)

    @property
    def log_sd(self) -> float:
        """Sum over operators of (share of the part's time) x (their log_sd), as if all erred one way."""
        total = sum(seconds for seconds, _ in self.of)
        return sum(seconds * sd for seconds, sd in self.of) / total if total > 0 else 0.0


class Assembly:
    """Tables of one deployment.

    Args:
        target: The deployment.
        ops: Its operators: the roofline's, or with measured kernels of no model.
        shard: By operator, what was learnt of the model's shard.
        kernels: By operator, what was learnt of kernels of no model, for their errors.
        host: Overhead of the host where the profile has none.
    """

    def __init__(
        self,
        target: Target,
        ops: Operators,
        shard: Mapping[str, Judged],
        kernels: Mapping[str, Judged],
        host: HostOverhead,
    ) -> None:
        self.target, self.ops, self.shard, self.kernels, self.host = target, ops, shard, kernels, host
        self.parts: dict[str, _Part] = {}
        told = roofline_errors(target.model, target.gpu, target.weight_dtype)
        self.roofline = {error.part: error.log_sd for error in told}

    def tables(self) -> CostTables:
        """The tables, their errors by part."""
        limits, longest = self.target.limits, self.target.max_model_len
        tokens = np.arange(max(limits.max_num_batched_tokens, limits.max_num_seqs) + 1.0)
        seqs = np.arange(limits.max_num_seqs + 1.0)
        chunk = grid_axis(max(limits.max_num_batched_tokens, longest)).astype(np.float64)
        context = grid_axis(longest).astype(np.float64)
        batch = grid_axis(limits.max_num_seqs).astype(np.float64)
        cached = grid_axis(min(limits.max_num_seqs * longest, LARGEST_KV_TOKENS)).astype(np.float64)
        prompts = {"chunk": chunk[:, None], "context": context[None, :]}
        decodes = {"seqs": batch[:, None], "kv_tokens": cached[None, :]}
        ops = self.ops
        by_part: dict[str, tuple[Callable[..., list[Work]], dict[str, Floats]]] = {
            "layer": (ops.layer, {"tokens": tokens}),
            "comm": (ops.all_reduces, {"tokens": tokens}),
            "first": (ops.first, {"tokens": tokens}),
            "send": (ops.send, {"tokens": tokens}),
            "head": (ops.head, {"tokens": seqs}),
            "host": (self._host, {"tokens": seqs}),
            "prefill": (ops.prefill, prompts),
            "decode": (ops.decode, decodes),
        }
        seconds: dict[str, Any] = {f"{part}_s": self._part(part, *asked) for part, asked in by_part.items()}
        stages = np.array(ops.shard.layers, dtype=np.int64)
        errors = with_front_error(self.errors(), self.host.front)
        return CostTables(**seconds, stage_layers=stages, errors=errors, front=self.host.front)

    def errors(self) -> tuple[PartError, ...]:
        """A PartError for each part that takes any time."""
        named = [(name, self.parts[name]) for name in _PARTS]
        return tuple(PartError(name, part.log_sd) for name, part in named if part.seconds.any())

    def filled(self) -> tuple[str, ...]:
        """Operators that the roofline filled in, by part."""
        return tuple(f"{name}: {', '.join(part.filled)}" for name, part in self.parts.items() if part.filled)

    def _part(self, part: str, works: Callable[..., list[Work]], axes: dict[str, Floats]) -> Floats:
        shape = np.broadcast_shapes(*(axis.shape for axis in axes.values()))
        flat = {name: np.broadcast_to(axis, shape).ravel() for name, axis in axes.items()}
        self.parts[part] = own = _Part(np.zeros(shape))
        left = self._measured(part, flat, own, shape)
        for work in works(*axes.values()):
            rest = left.get(work.name, 1.0)
            if rest > 0:
                sd, filled = self._error_of(work, part)
                own.add(np.broadcast_to(rest * work.seconds, shape), sd, filled)
        own.seconds[0] = own.seconds[0] if part == "host" else 0.0
        return np.ascontiguousarray(own.seconds)

    def _measured(
        self, part: str, flat: dict[str, Floats], own: _Part, shape: tuple[int, ...]
    ) -> dict[str, float]:
        """Adds what was learnt of the shard; what is left of the roofline's operators, by name."""
        left: dict[str, float] = {}
        for operator, judged in self.shard.items():
            points = shard_points(operator, flat, self.target) if OPERATOR_PARTS[operator] == part else None
            if points is None:
                continue
            seconds = judged.fitted(points).reshape(shape) * self.target.share(operator)
            own.add(seconds, self._sd(judged, part))
            for name, share in NAMES.get(operator, ((operator, 1.0),)):
                left[name] = left.get(name, 1.0) - share
        if "kv write" not in self.shard and any(OPERATOR_PARTS[o] == "prefill" for o in self.shard):
            left[_IN_ATTENTION] = 0.0
        return left

    def _error_of(self, work: Work, part: str) -> tuple[float, str]:
        """(log_sd, name if the roofline filled it in) of an operator that no shard was measured for."""
        name = "all-reduce" if "all-reduce" in work.name else work.name
        judged = self.kernels.get(name) or self.kernels.get(name.replace("window ", ""))
        is_measured = not np.any(work.compute_s) and not np.any(work.memory_s) and not np.any(work.network_s)
        if judged is None and is_measured and work.name != "host":
            judged = self.kernels.get("gemm") or self.kernels.get("gemm wide")
        return (self._sd(judged, part), "") if judged is not None else (self.roofline[part], work.name)

    def _sd(self, judged: Judged, part: str) -> float:
        """What is known of its error; else the widest that anything of the part has, the roofline among them."""
        if judged.log_sd is not None:
            return judged.log_sd
        known = [one.log_sd for name, one in self.shard.items() if OPERATOR_PARTS[name] == part]
        return max([self.roofline[part], *(sd for sd in known if sd is not None)])

    def _host(self, seqs: Floats) -> list[Work]:
        return [Work("host", latency_s=self.host.step_s + self.host.sequence_s * seqs)]
