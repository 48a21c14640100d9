"""The figures of links.toml follow from the recordings that they name."""

from __future__ import annotations

import polars as pl
import pytest

from lengthwise import catalog

LINKS = catalog.links()


@pytest.mark.parametrize(
    ("link", "recording"),
    [
        ("nvlink3-nvswitch", "a100_sxm/comm/nccl/2.27.3"),
        ("nvlink4-nvswitch", "h100_sxm/comm/nccl/2.27.3"),
        ("nvlink4-nvswitch", "h200_sxm/comm/nccl/2.29.2"),
        ("nvlink5-nvswitch", "b200_sxm/comm/nccl/2.29.2"),
    ],
)
def test_nvswitch_is_as_fast_as_nccl_measured(shared, link, recording):
    table = pl.read_parquet(shared(f"data/profiles/aiconfigurator/{recording}/nccl_perf.parquet"))
    reduces = table.filter((pl.col("op_name") == "all_reduce") & (pl.col("nccl_dtype") == "half"))
    over = {gpus: reduces.filter(pl.col("num_gpus") == gpus).sort("message_size") for gpus in (2, 4, 8)}
    elements, latency_ms = over[8].select("message_size", "latency").row(-1)
    bus_bandwidth = 2 * 7 / 8 * 2 * elements / (latency_ms * 1e-3)
    assert LINKS[link].bandwidth_bytes_per_s == pytest.approx(bus_bandwidth, rel=0.04)
    smallest_s = {gpus: rows["latency"][0] * 1e-3 for gpus, rows in over.items()}
    assert LINKS[link].latency_s == pytest.approx(smallest_s[2] / 2, rel=0.04)
    for gpus, hops in ((4, 2), (8, 3)):
        assert 2 * hops * LINKS[link].latency_s == pytest.approx(smallest_s[gpus], rel=0.4)


@pytest.mark.parametrize(
    ("link", "device", "gpus"),
    [
        ("nvlink3-bridge", "a100_pairwise_nvlink", 2),
        ("pcie4", "a100_pairwise_nvlink", 4),
        ("nvlink4-bridge", "h100_pairwise_nvlink", 2),
        ("pcie5", "h100_pairwise_nvlink", 4),
    ],
)
def test_bridges_and_pcie_are_as_fast_as_vidur_measured(shared, link, device, gpus):
    table = pl.read_csv(shared(f"data/profiles/vidur/network/{device}/all_reduce.csv.gz"))
    rows = table.filter(pl.col("num_workers") == gpus).sort("size").tail(5)
    seconds = rows["time_stats.all_reduce.median"] * 1e-3
    bus_bandwidth = 2 * (gpus - 1) / gpus * (rows["size"] / seconds).median()
    assert LINKS[link].bandwidth_bytes_per_s == pytest.approx(bus_bandwidth, rel=0.02)
