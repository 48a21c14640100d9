"""TensorRT-LLM's two capacity schedulers against a measured pair (NVIDIA/TensorRT-LLM issue 16827).

One H200 runs Llama-3.3-70B in FP8: 128 requests of 16,384 and 512 tokens, 32 at a time. The report's text known here
has no size of the KV pool and no limits of the engine: these are the planner's, with KV in FP8, and TensorRT-LLM's
defaults, with chunks, as a prompt exceeds the default of ``max_num_tokens``. The kernels are those of the roofline, and
those that NVIDIA has measured on an H200 (AIConfigurator's tables of vLLM; there are none of TensorRT-LLM there).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from lengthwise.cost.profiles import import_aiconfigurator, write_profile
from lengthwise.engine import deploy, simulate
from lengthwise.schema.deployment import EngineLimits, Scheduler, TrtllmSettings
from lengthwise.schema.workload import Workload

MEASURED = {
    "GUARANTEED_NO_EVICT": {"1.2.1": (161.0, 0.122), "1.3.0rc22": (160.7, 0.1409 / 1.15)},
    "MAX_UTILIZATION": {"1.2.1": (95.7, 1.1107), "1.3.0rc22": (159.2, 0.1409)},
}
"""Output tokens/s, and P99 of TPOT in seconds, by capacity scheduler and version."""
REQUESTS, OUTPUT = 128, 512
AIC = "data/profiles/aiconfigurator"


def pair(
    pool_tokens: int | None = None, cost: str = "roofline", name_of: str = "simulated"
) -> dict[str, dict[str, tuple[float, float]]]:
    """Add what is simulated, not calibrated, to what was measured."""
    columns = np.zeros(REQUESTS), np.full(REQUESTS, 16_384), np.full(REQUESTS, OUTPUT)
    limits = EngineLimits(2048, 8192, block_size=32, weight_dtype="fp8", kv_dtype="fp8")
    found = {}
    for name, measured in MEASURED.items():
        scheduler = Scheduler(trtllm=TrtllmSettings(name, enable_chunked_prefill=True))
        made = deploy(
            "llama-3.3-70b", "H200", limits=limits, scheduler=scheduler, cost=cost, host="trtllm",
            num_blocks=pool_tokens and pool_tokens // 32,
        )  # fmt: skip
        r = simulate(Workload(*columns, max_tokens=columns[2], concurrency=32), made, max_log_steps=0).requests
        tpot_s = float(np.quantile((r.finished_s - r.first_token_s) / (OUTPUT - 1), 0.99))
        found[name] = measured | {name_of: (float(REQUESTS * OUTPUT / r.finished_s.max()), tpot_s)}
    return found


def with_measured_kernels(tables: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """Do as ``pair`` with the kernels of an H200 from AIConfigurator's folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "h200.parquet"
        write_profile(import_aiconfigurator(tables, "h200_sxm", "vllm", "0.24.0"), path)
        return pair(cost=f"profile:{path}", name_of="measured kernels")


def errors(shared: Path | None = None) -> tuple[list[float], dict[str, dict[str, tuple[float, float]]]]:
    """Errors of tokens/s of 1.3.0rc22, and the pair; with the folder ``shared`` also by measured kernels."""
    found = pair()
    if shared is not None:
        found = {name: found[name] | one for name, one in with_measured_kernels(shared / AIC).items()}
    return [abs(one["simulated"][0] / one["1.3.0rc22"][0] - 1) for one in found.values()], found


def test_max_utilization_loses_what_it_loses_in_the_version_whose_rules_are_compared():
    """Both rules are compared with a version of July 2026, as 1.3.0rc22 is."""
    off, found = errors()
    own, other = found.values()
    gained = [np.array(other[of]) / own[of] for of in ("simulated", "1.3.0rc22")]
    assert np.abs(gained[0] / gained[1] - 1).max() < 0.1
    assert gained[0][1] > 1.05  # of P99 of TPOT; equal rules would give 1
    assert max(off) < 0.22


def test_the_pool_that_is_not_reported_does_not_decide_the_throughput():
    rates = [one["simulated"][0] for pool in (304_000, 416_000) for one in pair(pool).values()]
    assert max(rates) / min(rates) < 1.15


@pytest.mark.slow
def test_kernels_measured_on_an_h200_give_its_throughput(shared):
    """The roofline's products of FP8 weights are a fifth slower than measured ones; attention and decodes are not."""
    for one in with_measured_kernels(shared(AIC)).values():
        assert one["measured kernels"][0] == pytest.approx(one["1.3.0rc22"][0], rel=0.15)
