"""The numbers of the headline table: which, in which order, unit and direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from lengthwise.metrics import Estimate, Hardware, Summary

Read = Callable[[Summary], Estimate | None]
Unit = Literal["s", "1/s", "share", "seqs", "usd", "J"]

LESS, MORE, NEITHER = -1, 1, 0


@dataclass(frozen=True)
class Metric:
    """One number of a summary; ``unit`` decides how it is scaled, ``better`` which way is good.

    A terminal shows the ``headline`` ones, the page all.
    """

    key: str
    group: str
    label: str
    unit: Unit
    better: int
    read: Read
    headline: bool = True


def _latencies(field: str, label: str, headline: tuple[str, ...], more: tuple[str, ...] = ()) -> list[Metric]:
    def read(name: str) -> Read:
        return lambda s: getattr(getattr(s, field), name)

    order = sorted((*headline, *more), key=("mean", "p50", "p90", "p99").index)
    return [
        Metric(f"{field}.{n}", "Latency", f"{label} {n}", "s", LESS, read(n), headline=n in headline)
        for n in order
    ]


def _rate(key: str, label: str, read: Read) -> Metric:
    return Metric(f"rates.{key}", "Throughput", label, "1/s", MORE, read)


def _hardware(key: str, label: str, unit: Unit, read: Callable[[Hardware], Estimate]) -> Metric:
    def known(s: Summary) -> Estimate | None:
        return None if s.hardware is None else read(s.hardware)

    return Metric(f"hardware.{key}", "Hardware", label, unit, NEITHER, known)


def _cost(key: str, label: str, unit: Unit, read: Callable[[Hardware], Estimate]) -> Metric:
    return replace(_hardware(key, label, unit, read), key=f"cost.{key}", group="Cost", better=LESS)


METRICS: tuple[Metric, ...] = (
    *_latencies("ttft_s", "TTFT", ("mean", "p50", "p99"), ("p90",)),
    *_latencies("tpot_s", "TPOT", ("p50", "p99")),
    *_latencies("tbt_s", "TBT", ("p50", "p99")),
    *_latencies("jct_s", "JCT", ("mean", "p50", "p99")),
    *_latencies("queueing_delay_s", "Queueing", ("mean",), ("p99",)),
    *_latencies("normalized_latency_s", "Latency/token", (), ("mean",)),
    _rate("requests", "Requests", lambda s: s.rates.requests_per_s),
    _rate("output", "Output tokens", lambda s: s.rates.output_tokens_per_s),
    replace(_rate("prompt", "Prompt tokens", lambda s: s.rates.prompt_tokens_per_s), headline=False),
    replace(_rate("slo", "Within SLO", lambda s: s.goodput.share if s.goodput else None), unit="share"),
    _rate("goodput", "Goodput", lambda s: s.goodput.requests_per_s if s.goodput else None),
    _hardware("busy", "Busy", "share", lambda h: h.busy_share),
    _hardware("batch", "Batch", "seqs", lambda h: h.batch_seqs),
    _hardware("mfu", "MFU", "share", lambda h: h.mfu),
    _hardware("mbu", "MBU", "share", lambda h: h.mbu),
    _hardware("kv", "KV cache held", "share", lambda h: h.kv_utilization),
    _cost("output", "Per M output tokens", "usd", lambda h: h.cost.usd_per_million_output_tokens),
    replace(
        _cost("total", "Per M tokens, all", "usd", lambda h: h.cost.usd_per_million_tokens), headline=False
    ),
    _cost("energy", "Energy/output token", "J", lambda h: h.energy_j_per_output_token),
)
