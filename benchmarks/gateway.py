"""The gateway: its cost and that of its peers, its scaling, the time of a reorder, the gain of its order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from _harness import Row
from _sections import Sections

MODULES = {
    "gain": "_gateway_gain",
    "gain_emulated": "_gateway_gain:emulated",
    "rerank": "_gateway_cost:rerank",
    "scale": "_gateway_scale",
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: target, better, unit
    "gateway.added_p50_ms": (1.0, "lower", "ms"),
    "gateway.rps": (1500.0, "higher", "requests/s"),
    "gateway.cpu_us_per_token": (100.0, "lower", "us"),
    "gateway.cpu_us_per_token_back_to_back": (100.0, "lower", "us"),
    "gateway.rss_growth_mib": (10.0, "lower", "MiB"),
    "gateway.scale_50_over_10": (4.8, "higher", "times"),
    "gateway.rerank_10k_ms": (5.0, "lower", "ms"),
    **{
        f"gateway.{engines}.{name}": target
        for engines in ("live", "emulated")
        for name, target in {
            "gap_closed": (0.5, "higher", "of the gap"),
            "p99_over_oracle": (1.1, "lower", "times"),
            "simulated_within": (0.95, "higher", "of the results"),
            "simulated_in_interval": (0.95, "higher", "of the results"),
        }.items()
    },
}


def overhead(_: Path, quick: bool) -> Mapping[str, Callable[[], list[Row]]]:
    """Return a section for the gateway and for each peer."""
    from _gateway_cost import overhead
    from _gateway_processes import TARGETS

    return {
        f"overhead.{target.name}": (
            lambda target=target: [SECTIONS.row(*figure) for figure in overhead(target, quick).items()]
        )
        for target in TARGETS
    }


SECTIONS = Sections("gateway", (__doc__ or "").splitlines()[0], MODULES, TARGETS, overhead)

if __name__ == "__main__":
    sys.exit(SECTIONS.main())
