"""Laws of comparing two runs."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from lengthwise.metrics import Comparison, MetricError, Slo, bootstrap, compare
from lengthwise.metrics.bootstrap import sample_of
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.records import Records, RunResult
from lengthwise.schema.workload import After, SharedPrefixes, Workload

SLO = Slo(ttft_s=0.5, jct_s=3.0)


def measured(records: Records, source: str = "bench", **changes: object) -> RunResult:
    r = records.requests
    requested = np.maximum(1, r.output_tokens)
    return RunResult(records, Workload(r.arrival_s, r.prompt_tokens, requested), source, **changes)  # type: ignore[arg-type]


def of(toy: ModuleType, seed: int = 1, n: int = 300, **options: object) -> RunResult:
    return measured(toy.records(n, seed=seed, odd=False, **options))


def slower(run: RunResult, factor: float, noise: float = 0.0, seed: int = 0) -> RunResult:
    """The same requests, every latency multiplied, with noise of its own for each."""
    r = run.records.requests
    by = factor * np.exp(np.random.default_rng(seed).normal(0, noise, len(r.arrival_s)))
    moved = {
        name: r.arrival_s + (getattr(r, name) - r.arrival_s) * by
        for name in ("scheduled_s", "first_token_s", "finished_s")
    }
    end_s = float(np.nanmax(moved["finished_s"]))
    return replace(run, records=replace(run.records, requests=replace(r, **moved), end_s=end_s))


@pytest.fixture(scope="module")
def run(toy) -> RunResult:
    return of(toy)


def known(found: Comparison) -> list[MetricError]:
    return [one for one in found.errors if one.has_interval]


def test_a_run_is_not_off_itself(run) -> None:
    found = compare(run, run, slo=SLO)
    assert found.paired
    assert len(known(found)) >= 25
    assert all(one.error == 0 for one in found.errors if one.b)
    assert all(one.low == one.high == 0 for one in known(found))
    assert all(one.wasserstein == one.kolmogorov_smirnov == 0 for one in found.distances)
    assert all(one.mape == one.median_ape == 0 for one in found.distances if one.metric != "tbt")
    alone = compare(run, run, slo=SLO, paired=False)
    assert all(one.low <= 0 <= one.high for one in known(alone))
    assert any(one.low < one.high for one in known(alone))


def test_swapping_the_sides_inverts_the_signs(run) -> None:
    present, back = compare(slower(run, 1.3), run), compare(run, slower(run, 1.3))
    for one, other in zip(present.errors, back.errors, strict=True):
        assert (one.a, one.b) == (other.b, other.a)
        assert np.sign(one.error) == -np.sign(other.error) or np.isnan(one.error)
    assert present["jct.p50"].low > 0 > back["jct.p50"].high


def test_a_known_error_is_found_everywhere(run) -> None:
    found = compare(slower(run, 1.2), run)
    for metric in ("ttft", "tpot", "jct", "normalized_latency"):
        for stat in ("mean", "p50", "p90", "p95", "p99"):
            one = found[f"{metric}.{stat}"]
            assert one.error == pytest.approx(0.2, abs=1e-6)
            assert one.low == pytest.approx(0.2, abs=1e-6)
            assert one.high == pytest.approx(0.2, abs=1e-6)
    by_metric = {one.metric: one for one in found.distances}
    assert by_metric["jct"].mape == pytest.approx(0.2)
    assert by_metric["jct"].wasserstein == pytest.approx(0.2)
    assert 0 < by_metric["jct"].kolmogorov_smirnov < 0.5


def test_the_least_error_is_the_near_end_of_its_interval() -> None:
    def least(a: float, *ends: float) -> float:
        return MetricError("jct", "p50", a, 1.0, *ends).least

    assert least(1.3, 0.1, 0.4) == 0.1
    assert least(0.7, -0.4, -0.1) == 0.1
    assert least(1.05, -0.1, 0.2) == 0.0
    assert least(0.7) == pytest.approx(0.3)


def test_points_are_those_of_numpy(run) -> None:
    found = compare(run, run)
    jct = run.records.requests.finished_s - run.records.requests.arrival_s
    assert found["jct.mean"].a == pytest.approx(jct.mean())
    assert found["jct.p95"].a == pytest.approx(np.quantile(jct, 0.95))


def test_pairs_make_intervals_tighter(run) -> None:
    noisy = slower(run, 1.1, noise=0.1)
    paired, alone = compare(noisy, run), compare(noisy, run, paired=False)
    widths = [(one.high - one.low, two.high - two.low) for one, two in
              zip(known(paired), known(alone), strict=True) if one.metric in ("ttft", "tpot", "jct")]  # fmt: skip
    assert all(tight < wide for tight, wide in widths)
    assert np.mean([tight / wide for tight, wide in widths]) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False])
def test_intervals_contain_the_truth_about_as_often_as_stated(paired) -> None:
    """Correlated latencies of a known mean ratio: 90 % intervals of the mean hold it in most of 120 worlds."""
    covered = []
    for seed in range(120):
        rng = np.random.default_rng(seed)
        b = latencies(rng, 400)
        a = 1.1 * (b * np.exp(rng.normal(0, 0.2, 400) - 0.02) if paired else latencies(rng, 400))
        drawn = bootstrap.Bootstrap(paired, draws=200, seed=seed, level=0.9)
        low, high = drawn.error_interval(sample_of(a), sample_of(b), np.zeros(0))
        covered.append(low[0] <= 0.1 <= high[0])
    assert 0.8 <= np.mean(covered) <= 0.97


def latencies(rng: np.random.Generator, n: int) -> np.ndarray:
    """Autoregressive log latencies: neighbours are alike, and the mean is 1."""
    noise, log = rng.normal(0, 0.3, n), np.zeros(n)
    for i in range(1, n):
        log[i] = 0.6 * log[i - 1] + noise[i]
    return np.exp(log - 0.3**2 / (1 - 0.36) / 2)


def world(jct_s: np.ndarray) -> RunResult:
    base = WORLD
    n = len(jct_s)
    arrival = np.arange(n, dtype=float)
    r = base.records.requests
    tokens = np.full(n, 10)
    requests = replace(
        r, arrival_s=arrival, prompt_tokens=tokens, output_tokens=tokens, status=np.zeros(n, np.int8),
        replica=np.zeros(n, np.int32), scheduled_s=arrival, first_token_s=arrival + jct_s / 2,
        finished_s=arrival + jct_s, preemptions=np.zeros(n, np.int32), queued_for_s=np.zeros(n),
        rejection=np.zeros(n, np.int8),
    )  # fmt: skip
    return measured(replace(base.records, requests=requests, end_s=n + 10.0))


@pytest.fixture(autouse=True, scope="module")
def _base(toy):
    global WORLD  # noqa: PLW0603 - records to put columns into
    WORLD = of(toy, n=30)


def test_it_is_the_same_every_time_and_another_with_another_seed(toy, run) -> None:
    other = of(toy, seed=2)
    assert repr(compare(run, other)) == repr(compare(run, other))
    assert repr(compare(run, other)) != repr(compare(run, other, seed=1))


def test_groups_of_values_change_the_tails_little(monkeypatch) -> None:
    rng = np.random.default_rng(1)
    b = latencies(rng, 6000)
    a = b * np.exp(rng.normal(0.1, 0.2, 6000))
    rough = compare(world(a), world(b), draws=100)["jct.p99"]
    monkeypatch.setattr(bootstrap, "GROUPS", 10**6)
    exact = compare(world(a), world(b), draws=100)["jct.p99"]
    assert (rough.low, rough.high) == pytest.approx((exact.low, exact.high), abs=0.01)


def test_different_requests_are_unpaired_and_warned_about(toy, run) -> None:
    found = compare(of(toy, seed=2), run)
    assert not found.paired
    assert any("different requests" in warning or "The workloads differ" in warning for warning in found.warnings)
    assert all(np.isnan(one.mape) for one in found.distances)
    longer = replace(run, workload=replace(run.workload, prompt_tokens=2 * run.workload.prompt_tokens))
    assert any("prompts have" in warning for warning in compare(longer, run).warnings)
    late = replace(run, workload=replace(run.workload, arrival_s=2 * run.workload.arrival_s))
    shifted = compare(late, run)
    assert not shifted.paired
    assert any("arrive at different times" in warning for warning in shifted.warnings)


def with_cache(run: RunResult, share: float, seed: int = 0) -> RunResult:
    """The run with about this share of each prompt cached."""
    r = run.records.requests
    cached = np.random.default_rng(seed).binomial(r.prompt_tokens, share)
    return replace(run, records=replace(run.records, requests=replace(r, cached_tokens=cached)))


@pytest.mark.parametrize("paired", [True, False])
def test_the_share_of_cached_prompt_tokens_is_compared(run, paired) -> None:
    found = compare(with_cache(run, 0.6), with_cache(run, 0.5, seed=1), paired=paired)["hit_rate"]
    for side, share in ((found.a, 0.6), (found.b, 0.5)):
        assert side == pytest.approx(share, abs=0.02)
    assert found.low < found.error < found.high
    assert found.low < 0.6 / 0.5 - 1 < found.high
    assert found.high - found.low < 0.1


def test_cached_tokens_of_a_server_are_its_own_counts(run) -> None:
    counted = {"prefix_cache": {"looked_up_tokens": 1000.0, "found_tokens": 400.0}}
    served = replace(run, metadata=counted)
    found = compare(with_cache(run, 0.6), served)["hit_rate"]
    assert found.b == pytest.approx(0.4)
    assert not found.has_interval
    warm = float(np.median(run.records.requests.arrival_s))
    for missing in (compare(with_cache(run, 0.6), run), compare(with_cache(run, 0.6), served, warmup_s=warm)):
        assert "hit_rate" not in {one.key for one in missing.errors}
    assert "hit_rate" not in {one.key for one in compare(with_cache(run, 0.0), with_cache(run, 0.0)).errors}


def test_other_prefixes_and_sessions_of_the_same_requests_are_warned_about(run) -> None:
    n = len(run.workload)
    ends = run.workload.prompt_tokens + run.workload.output_tokens
    longer = run.workload.prompt_tokens.copy()
    longer[1] = ends[0] + 1
    chat = replace(run.workload, prompt_tokens=longer)
    after = After(np.array([0, 0, *[1] * (n - 1)]), np.array([0]))
    start = np.arange(n + 1)
    kinds = {
        "share": [
            replace(chat, prefixes=SharedPrefixes(1, start, np.full(n, k % 2) + np.arange(n) * k)) for k in range(2)
        ],
        "wait for": [replace(chat, after=after), replace(chat, after=replace(after, delay_s=np.full(n, 2.0)))],
    }
    for verb, (one, other) in kinds.items():
        sides = [replace(run, workload=workload) for workload in (one, other, chat)]
        assert any(f"Requests {verb} different" in text for text in compare(sides[0], sides[1]).warnings)
        warnings = compare(sides[0], sides[2]).warnings
        assert any(text.startswith(f"Requests {verb} ") and "in A and not in B" in text for text in warnings)
        assert not any(f"Requests {verb}" in text for text in compare(sides[0], sides[0]).warnings)


def test_warnings_of_either_side_are_carried_over(run) -> None:
    doubted = replace(run, warnings=("the client was late",), errors={"timeout": 3, "reset": 1})
    warnings = compare(run, doubted).warnings
    assert "B: the client was late" in warnings
    assert "B: 4 requests failed, most of: timeout." in warnings
    assert compare(run, run).warnings == ()


def test_partial_runs_and_disagreeing_clocks_are_warned_about(toy, run) -> None:
    cut = measured(toy.records(300, seed=1, odd=True))
    assert any("B is a partial run" in warning for warning in compare(run, cut, paired=False).warnings)
    r = run.records.requests
    skewed = replace(run.records, requests=replace(r, first_token_s=r.first_token_s - 10))
    assert any("A: clocks disagree: " in warning for warning in compare(replace(run, records=skewed), run).warnings)


def test_outputs_of_differing_length_are_warned_about(run) -> None:
    r = run.records.requests
    short = replace(run.records, requests=replace(r, output_tokens=np.maximum(1, r.output_tokens // 2)))
    warnings = compare(replace(run, records=short), run).warnings
    assert any("outputs differ in length between A and B" in warning for warning in warnings)


def test_few_requests_yield_no_interval(toy) -> None:
    few = of(toy, n=12)
    found = compare(few, few)
    assert known(found) == []
    assert any("There are 12 requests" in warning for warning in found.warnings)


def test_the_warm_up_is_left_out_on_both_sides(run) -> None:
    half_s = float(np.median(run.records.requests.arrival_s))
    found = compare(run, run, warmup_s=half_s)
    assert found.a.counts.arrivals == found.b.counts.arrivals == 150
    with pytest.raises(InputError, match="warm-up must leave requests"):
        compare(run, run, warmup_s=1e9)


def test_what_cannot_be_is_refused(toy, run) -> None:
    with pytest.raises(InputError, match="compared request by request"):
        compare(of(toy, n=30), run, paired=True)
    with pytest.raises(InputError, match="level must be between 0 and 1"):
        compare(run, run, level=95)
    with pytest.raises(UnknownNameError, match=r"jct\.p95"):
        compare(run, run)["jct.p96"]
