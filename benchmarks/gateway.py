"""The gateway in figures: what it costs beside its peers, how it scales, how fast it sorts its queue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from _harness import Row
from _sections import Sections

MODULES = {
    "gain": "_gateway_gain",
    "gain_emulated": "_gateway_gain_emulated",
    "rerank": "_gateway_rerank",
    "scale": "_gateway_scale",
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: target, which way is better, unit
    "gateway.added_p50_ms": (1.0, "lower", "ms"),
    "gateway.rps": (1500.0, "higher", "requests/s"),
    "gateway.cpu_us_per_token": (100.0, "lower", "us"),
    "gateway.cpu_us_per_token_back_to_back": (100.0, "lower", "us"),
    "gateway.rss_growth_mib": (10.0, "lower", "MiB"),
    "gateway.scale_50_over_10": (4.8, "higher", "times"),
    "gateway.rerank_10k_ms": (5.0, "lower", "ms"),
    "gateway.live.gap_closed": (0.5, "higher", "of the gap"),
    "gateway.live.p99_over_oracle": (1.1, "lower", "times"),
    "gateway.live.simulated_within": (0.95, "higher", "of the results"),
    "gateway.live.simulated_in_interval": (0.95, "higher", "of the results"),
    "gateway.emulated.gap_closed": (0.5, "higher", "of the gap"),
    "gateway.emulated.p99_over_oracle": (1.1, "lower", "times"),
    "gateway.emulated.simulated_within": (0.95, "higher", "of the results"),
    "gateway.emulated.simulated_in_interval": (0.95, "higher", "of the results"),
}


def overhead(_: Path, fast: bool) -> Mapping[str, Callable[[], list[Row]]]:
    """A section for the gateway and for each peer, run one after the other."""
    import _gateway_overhead

    def rows(target: _gateway_overhead.Target) -> list[Row]:
        return [SECTIONS.row(*one) for one in _gateway_overhead.figures(target, fast=fast).items()]

    return {f"overhead.{one.name}": (lambda one=one: rows(one)) for one in _gateway_overhead.TARGETS}


SECTIONS = Sections("gateway", (__doc__ or "").splitlines()[0], MODULES, TARGETS, overhead)

if __name__ == "__main__":
    sys.exit(SECTIONS.main())
