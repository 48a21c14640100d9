"""How often model intervals hold what was measured is counted as it should be, and Argonne's files are read whole."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lengthwise.cost import HostOverhead
from lengthwise.cost.operator_work import CURVES
from lengthwise.engine import simulate

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    _brackets, _intervals, _silicon_argonne, _silicon = map(
        importlib.import_module, ("_brackets", "_intervals", "_silicon_argonne", "_silicon")
    )
finally:
    sys.path.remove(BENCHMARKS)


def bracket(measured, low=0.5, high=2.0, gpu="x"):
    of = {"model": "m", "gpu": gpu}
    return _brackets.Bracket("ttft", of, _intervals.Interval(measured, 1.0, low, high))


def test_coverage_counts_what_lies_within_and_on_which_side_the_rest_fell():
    reported = _brackets.coverage([*(bracket(1.0) for _ in range(7)), bracket(0.4), bracket(2.0), bracket(2.1)])
    assert (reported["coverage"], reported["below"], reported["above"]) == (0.8, 1, 1)
    assert reported["log_sd_told"] == pytest.approx(0.421, abs=1e-3)


def point(model="llama-3.1-70b", gpu="H100", clients=8, ttft_s=0.1):
    cut = {"tp": 4, "dp": 1, "moe_tp": 1, "ep": 1}
    load = {"isl": 512, "osl": 32, "concurrency": clients, "ttft_s": ttft_s, "tpot_s": 0.01}
    of = {"id": "", "backend": "vllm", "dtype": "fp8", "source": "inferencemax", "measured": ""}
    return _silicon.Point(model=model, gpu=gpu, **cut, **load, **of)


def test_of_a_lone_client_a_first_token_takes_prefill_transfer_and_a_decode_step():
    cut = {"tp": 8, "dp": 1, "moe_tp": 8, "ep": 1}
    lone = replace(point("deepseek-v3", "H200", clients=1), **cut, isl=4096, osl=64, prefill=(1, 8, 1, 8, 1))
    ops, host = _silicon.operators(lone, CURVES), HostOverhead(request_s=0.03)
    ttft_s, tpot_s = _silicon.simulated(lone, CURVES, host)
    loop = _silicon.loop_of(lone)
    prompt, kv = sum(loop.prompt) / 2, sum(loop.prompt) / 2 + sum(loop.output) / 4
    prefill_s = _silicon.step_s(ops, host, seqs=0.0, kv=0.0, chunk=prompt, prompts=1.0)
    link = ops.node.network
    transfer_s = prompt * ops.shard.kv_bytes * 61 / link.bandwidth_bytes_per_s + link.latency_s
    assert tpot_s == pytest.approx(float(_silicon.step_s(ops, host, seqs=1.0, kv=kv)), rel=0.02)
    assert ttft_s == pytest.approx(0.03 + float(prefill_s) + transfer_s + tpot_s, rel=0.05)


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_a_point_is_predicted_by_the_settings_of_its_split(ep):
    cut = {"tp": 2, "dp": 4, "moe_tp": 8 // ep, "ep": ep}
    several = replace(point("deepseek-v3", "B200", clients=64), **cut)
    deployment = _silicon.deployed(several, CURVES, HostOverhead())
    parallel = deployment.parallel
    assert (parallel.tp, parallel.dp, parallel.ep, parallel.gpus_per_expert) == (2, 4, ep, 8 // ep)
    assert deployment.limits.max_num_seqs == 16
    same = _silicon.deployed(several, "roofline", HostOverhead())
    for part in ("layer_s", "shared_s", "host_s", "decode_s"):
        np.testing.assert_array_equal(getattr(deployment.cost, part), getattr(same.cost, part))
    ops = _silicon.operators(several, CURVES)
    _, tpot_s = _silicon.simulated(several, CURVES, HostOverhead())
    kv = 16 * (0.9 * several.isl + 0.9 * several.osl / 2)
    assert tpot_s > float(_silicon.step_s(ops, HostOverhead(), seqs=16.0, kv=kv)) * 0.9


def test_more_prefill_workers_shorten_the_wait_and_more_decode_workers_the_steps():
    cut = {"tp": 1, "dp": 8, "moe_tp": 1, "ep": 8}
    busy = replace(point("deepseek-v3", "B200", clients=256), **cut, isl=8192, osl=128, prefill=(1, 1, 8, 1, 8))
    found = {
        (x, y): _silicon.simulated(one, CURVES, HostOverhead())
        for x, y in ((1, 1), (4, 1), (4, 4))
        for one in [replace(busy, workers=y, prefill=(x, *busy.prefill[1:]))]
    }
    assert found[4, 1][0] < 0.5 * found[1, 1][0]
    assert found[4, 4][1] < found[4, 1][1]


def test_where_decode_workers_run_fewer_sequences_than_clients_first_tokens_wait_for_them():
    cut = {"tp": 8, "dp": 1, "moe_tp": 8, "ep": 1}
    unlimited = replace(point("deepseek-v3", "B200", clients=64), **cut, isl=1024, osl=256, prefill=(1, 8, 1, 8, 1))
    found = [
        _silicon.simulated(one, CURVES, HostOverhead())
        for one in (unlimited, replace(unlimited, max_num_seqs=64), replace(unlimited, max_num_seqs=16))
    ]
    assert found[0] == pytest.approx(found[1])
    assert found[2][0] > 64 / 16 / 2 * 200 * found[2][1]
    assert found[2][1] < found[0][1]


def test_every_row_of_the_sample_is_scored_or_left_out_for_a_reason(shared):
    root = shared(_silicon.FILE).parents[len(Path(_silicon.FILE).parts) - 1]
    points, left = _silicon.read(root)
    assert len(points) + sum(left.values()) == 3556
    kinds = {of.kind for of in points}
    assert kinds >= {"dense, aggregated", "MoE, aggregated", "MoE, P/D", "hybrid, aggregated"}
    assert all(of.prefill[0] >= 1 and of.workers >= 1 for of in points if of.prefill)
    proposed = {(of.family, of.backend, of.dp > 1): of.drafts for of in points if of.drafts}
    recipes = {("deepseek", "trtllm", False): 3, ("deepseek", "trtllm", True): 1, ("deepseek", "sglang", False): 2}
    assert proposed == {**recipes, ("qwen3.5", "sglang", False): 3}


def test_the_least_spread_is_that_whose_interval_just_contains_the_point():
    host = HostOverhead(request_s=0.03, serial_s=0.001)
    late = point(ttft_s=0.5)
    needed = _brackets.least(late, host)
    deployment = _brackets.deployed(late, "roofline", host)
    loop = _silicon.loop_of(late)
    requests = loop.workload()
    before = _brackets.GRID[_brackets.GRID.index(needed) - 1]
    ends = [
        _brackets.interval(
            lambda one: list(_brackets.means(simulate(requests, one, max_log_steps=0), loop)),
            replace(deployment, cost=_brackets.skewed(deployment.cost, slow_s)),
        )[2][0]
        for slow_s in (before, needed)
    ]
    assert ends[0] < late.ttft_s <= ends[1]


def test_the_spread_is_that_with_which_one_in_twenty_is_nearest_to_lie_above():
    host = HostOverhead(request_s=0.03, serial_s=0.001)
    early, late = point(ttft_s=0.01), point(ttft_s=0.5)
    assert _brackets.least(early, host) == 0.0
    assert _brackets.least(point(ttft_s=1e6), host) == math.inf
    needed = np.array([_brackets.least(one, host) for one in (early, late)])
    assert _brackets.spread(needed) == needed[1]


def exact_draws(groups):
    """Shares of all equally likely draws of as many groups, in order."""
    of = [(sum(group), len(group)) for group in groups.values()]
    return sorted(
        sum(hits for hits, _ in drawn) / sum(size for _, size in drawn)
        for drawn in itertools.product(of, repeat=len(of))
    )


def test_the_interval_of_a_share_is_that_of_all_draws_of_complete_groups():
    groups = {"a": [True] * 9 + [False], "b": [True, False, False], "c": [True] * 4, "d": [False, True] * 10}
    exact = exact_draws(groups)
    low, high = _intervals.share_interval(groups)
    assert low == pytest.approx(exact[int(0.025 * len(exact))], abs=0.03)
    assert high == pytest.approx(exact[int(0.975 * len(exact))], abs=0.03)
    assert (low, high) == _intervals.share_interval(dict(reversed(groups.items())))


def test_more_points_of_the_same_pairs_add_no_information():
    groups = {"a": [True] * 9 + [False], "b": [True, False], "c": [True] * 4}
    swept = {pair: points * 50 for pair, points in groups.items()}
    assert _intervals.share_interval(swept) == _intervals.share_interval(groups)


@pytest.mark.parametrize("groups", [{"a": [True, False]}, {"a": [True], "b": [True] * 9}])
def test_where_draws_do_not_differ_there_is_no_interval(groups):
    assert _intervals.share_interval(groups) is None


def test_coverage_reports_its_number_of_pairs():
    reported = _brackets.coverage(
        [bracket(1.0), bracket(0.4), bracket(1.0, gpu="y"), bracket(1.0, gpu="y"), bracket(3.0, gpu="y")]
    )
    assert (reported["n"], reported["pairs"], reported["coverage"]) == (5, 2, 0.6)
    assert reported["ci"] is None  # of two pairs
    assert _brackets.coverage([bracket(1.0), bracket(0.4)])["ci"] is None


def test_first_tokens_of_both_files_are_joined_once_a_deployment(shared):
    root = shared(_silicon_argonne.ROOT).parents[2]
    rows = _silicon_argonne.first_rows(root)
    keys = [(r["Hardware"], r["Num of Hardware"], r["Framework"], r["Model"]) for r in rows]
    assert len(set(keys)) == len(keys) >= 29
    amd = next(r for r in rows if r["Hardware"] == "AMD MI300X GPU" and r["Model"] == "meta-llama/Llama-2-7b-hf")
    assert amd["first"] == pytest.approx(2.27583, rel=1e-5)
    assert amd["end"] == pytest.approx(14.61676, rel=1e-5)


def test_an_interval_is_reported_from_five_pairs_on():
    few = [bracket(3.0 if at else 1.0, gpu=str(at)) for at in range(_intervals.MIN_GROUPS)]
    assert _brackets.coverage(few[1:] + few[1:2])["ci"] is None
    low, high = _brackets.coverage(few)["ci"]
    assert 0 <= low < high <= 1
