"""The gateway: its cost and that of its peers, its scaling, the time of a reorder, the gain of its order."""

from _sections import Sections

MEASURED = ("gateway", "peer.vllm_router", "peer.smg", "peer.sglang_router", "peer.litellm")
MODULES = {
    **{f"overhead.{name}": f"_gateway_cost:overhead:{name}" for name in MEASURED},
    "gain": "_gateway_gain:figures:live",
    "gain_emulated": "_gateway_gain:figures:emulated",
    "rerank": "_gateway_cost:rerank",
    "scale": "_gateway_cost:scale",
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


SECTIONS = Sections("gateway", __doc__, MODULES, TARGETS)

if __name__ == "__main__":
    SECTIONS.main()
