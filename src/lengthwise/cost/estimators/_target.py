"""What tables are for: a model's shard on a GPU, and the operators that the roofline counts in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lengthwise.cost._efficiency import Work, kernels_of
from lengthwise.cost._operators import Operators
from lengthwise.cost._shard import shard_of
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.hardware import GpuSpec, NodeSpec
from lengthwise.schema.model import ModelSpec

NAMES: dict[str, tuple[tuple[str, float], ...]] = {
    "input norm": (("norms", 0.5),),
    "post-attention norm": (("norms", 0.5),),
    "residual add": (("norms", 0.375),),
    "fused moe": (("experts up", 1.0), ("expert activation", 1.0), ("experts down", 1.0)),
}
"""A profile's operator as shares of the roofline's, where the names differ. A residual is read twice and
written once, the roofline's two norms move eight of its sizes."""

_DENSE = ("mlp up", "activation", "mlp down")
_ROUTED = ("router", "experts up", "expert activation", "experts down", "fused moe")


@dataclass(frozen=True)
class Target:
    """A model on GPUs, and how large its steps may become."""

    model: ModelSpec
    gpu: GpuSpec
    node: NodeSpec
    parallel: Parallelism
    limits: EngineLimits
    max_model_len: int

    @property
    def weight_dtype(self) -> str:
        """Of the layers' matrices."""
        return self.limits.weight_dtype or self.model.dtype

    def with_tp(self, tp: int) -> Target:
        """The same on another number of GPUs."""
        return replace(self, parallel=Parallelism(tp, self.parallel.pp, self.parallel.replicas))

    def operators(self) -> Operators:
        """The roofline's operators of one GPU."""
        shard = shard_of(self.model, self.parallel, self.limits)
        return Operators(shard, kernels_of(self.gpu, shard.weight_dtype), self.node)

    def share(self, operator: str) -> float:
        """Of how many of the layers an operator is part: tables hold the mean layer, profiles one that has it."""
        ffn, attention, layers = self.model.ffn, self.model.attention, self.model.layers
        if ffn.experts and operator in _DENSE:
            return ffn.dense_layers / layers
        if ffn.experts and (operator in _ROUTED or operator.startswith("shared ")):
            return 1 - ffn.dense_layers / layers
        windowed = attention.windowed_layers / layers if attention.window_tokens else 0.0
        if operator.endswith("window attention"):
            return windowed
        return 1 - windowed if operator in ("prefill attention", "decode attention") else 1.0


def roofline_work(works: list[Work], operator: str) -> Work | None:
    """The roofline's work of a profile's operator, summed over its shares; None: it has none."""
    wanted = NAMES.get(operator, ((operator, 1.0),))
    by_name = {work.name: work for work in works}
    found = [by_name[name].times(share) for name, share in wanted if name in by_name]
    if len(found) < len(wanted):
        return None
    fields = ("flops", "bytes", "compute_s", "memory_s", "network_s", "latency_s")
    return Work(operator, **{field: sum(getattr(work, field) for work in found) for field in fields})
