"""The gateway: its cost and that of its peers, its scaling, the time of a reorder, the gain of its order."""

from _sections import Sections

MEASURED = ("gateway", "gateway.envoy", "peer.vllm_router", "peer.smg", "peer.sglang_router", "peer.litellm")
MODULES = {
    **{f"overhead.{name}": f"_gateway_cost:overhead:{name}" for name in MEASURED},
    "gain": "_gateway_gain:figures:live",
    "gain_emulated": "_gateway_gain:figures:emulated",
    "fair": "_gateway_gain:fair",
    **{name: f"_gateway_cost:{name}" for name in ("picker", "rerank", "scale")},
}
SECTIONS = Sections("gateway", __doc__, MODULES)

if __name__ == "__main__":
    SECTIONS.main()
