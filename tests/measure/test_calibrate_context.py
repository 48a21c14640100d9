"""What prefill attention to cached tokens costs: found where prompts share prefixes, and not extrapolated elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_counters import scraped
from planted_runs import LIMITS, errors, measured, requests

from lengthwise import engine
from lengthwise.engine.step_time import CostReader
from lengthwise.measure.calibration import calibrate
from lengthwise.measure.calibration.measured_runs import split_of
from lengthwise.measure.calibration.parameters import apply
from lengthwise.measure.load import LoadSettings
from lengthwise.metrics import beyond_reach
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

TRUTH = {"work": 1.2, "prefill": 2.0, "context": 0.5}
FIT = ("work", "prefill", "context")


@pytest.fixture(scope="module")
def caching():
    """A small model with long prompts, whose attention takes much of a step."""
    limits = replace(LIMITS, max_num_seqs=32, max_num_batched_tokens=8192, enable_prefix_caching=True)
    return engine.deploy("llama-3.2-1b", "H100", limits=limits)


def plain(n=80, seed=0, rate=10.0):
    return requests(rate, n, seed, prompt=(500, 7000), output=(5, 30))


def sharing(n=80, seed=1, share=0.9, rate=15.0):
    return LoadSettings(shared_prefix=share).applied_to(requests(rate, n, seed, prompt=(3000, 7900), output=(5, 30)))


def counted(run, share=1.0):
    """The run with the server's counters of its cached tokens, ``share`` of those that were found."""
    looked_up, found = (int(one.sum()) for one in (run.workload.prompt_tokens, run.records.requests.cached_tokens))
    return replace(run, metadata={"prefix_cache": {"looked_up_tokens": looked_up, "found_tokens": share * found}})


@given(st.integers(1, 8000), st.integers(0, 8000), st.floats(0.1, 10), st.floats(0.1, 10))
def test_context_and_chunk_have_a_factor_each(caching, chunk, context, prefill, of_context):
    def seconds(values, at):
        return CostReader(apply(caching.cost, values)).step(0, 0, [(chunk, at)]).prefill_attention_s

    own_s = seconds({}, 0)
    expected = prefill * own_s + of_context * (seconds({}, context) - own_s)
    assert seconds({"prefill": prefill, "context": of_context}, context) == pytest.approx(expected)


@pytest.mark.slow
def test_a_run_of_shared_prompts_determines_what_cached_tokens_cost(caching):
    runs = [measured(plain(), caching, TRUTH), counted(measured(sharing(), caching, TRUTH, seed=1))]
    found = calibrate(runs, caching, fit=FIT)
    for name in ("prefill", "context"):
        assert found[name].determined
        assert found[name].low <= TRUTH[name] <= found[name].high
        assert found[name].high / found[name].low < 2
    assert any("in its prefix cache, its simulation" in note for note in found.notes)
    cached = runs[1].records.requests.cached_tokens
    assert 3000 < found.tables.evidence.reach.prefix <= cached.max()
    assert abs(errors(found, "ttft", "mean")[1].after) < 0.05


def test_runs_without_context_leave_its_cost_where_it_was_and_say_so(caching):
    """The cost of chunks without context is not carried over, but the stated error allows for it."""
    found = calibrate([measured(plain(), caching, TRUTH)], caching, fit=FIT)
    assert found["prefill"].low <= TRUTH["prefill"] <= found["prefill"].high
    assert not found["context"].determined
    assert found["context"].value == 1.0
    given, made = caching.cost.prefill_s, found.tables.prefill_s
    np.testing.assert_allclose(made[:, 1:] - made[:, :1], given[:, 1:] - given[:, :1], atol=1e-12)
    error = {e.part: e.log_sd for e in found.tables.evidence.errors}["context"]
    assert error > np.log(found["prefill"].value) > 0.3
    assert found.tables.evidence.reach.prefix == 0
    assert any("do not show what prefill attention to cached tokens costs" in note for note in found.notes)
    served = replace(caching, cost=found.tables)
    (beyond,) = (one for one in beyond_reach(engine.simulate(sharing(), served), served) if one.bound == "prefix")
    assert beyond.measured == 0
    assert beyond.largest > 3000


def test_the_cache_of_the_engine_must_be_that_of_the_simulation(caching):
    runs = [measured(plain(), caching, TRUTH), measured(sharing(), caching, TRUTH)]
    with pytest.raises(
        InputError, match=r"must be of the deployment.s prefix cache; the server found .*--allow-warnings"
    ):
        calibrate([runs[0], counted(runs[1], 0.9)], caching, fit=FIT)
    without = replace(caching, limits=replace(caching.limits, enable_prefix_caching=False))
    with pytest.raises(InputError, match=r"must have a prefix cache; it has none\. Set engine\.enable_prefix_caching"):
        calibrate(runs, without, fit=FIT)


def test_shared_prompts_are_fitted_whatever_share_is_held_out(caching):
    loads = [(5.0, 0), (10.0, 1), (15.0, 2)]
    runs = [measured(plain(60, seed, rate), caching, {}, seed=seed) for rate, seed in loads]
    runs.append(measured(sharing(60, 3, rate=8.0), caching, {}, seed=3))
    split = split_of(runs, caching, 0.3, ())
    assert [bool(run.validation.all()) for run in split.runs] == [False, True, False, False]
    split = split_of(runs[2:], caching, 0.3, ())
    assert all(run.fit.any() and run.validation.any() for run in split.runs)


@pytest.mark.slow
def test_counters_of_shared_prompts_are_not_fitted(caching):
    workloads = (requests(30.0), sharing())
    runs = [scraped(one, caching, {"work": 1.2}, 0.25, seed=k) for k, one in enumerate(workloads)]
    notes = " ".join(calibrate(runs, caching, fit=["work"]).notes)
    assert f"{runs[1].workload.name} were not fitted: they do not say which tokens were cached" in notes
    assert "busy periods of 1 run " in notes


@pytest.fixture(scope="module", params=[16, 32])
def of_block_size(request):
    limits = replace(LIMITS, block_size=request.param, enable_prefix_caching=True)
    return engine.deploy("llama-3.2-1b", "H100", limits=limits)


@given(share=st.floats(0.05, 0.95), lengths=st.lists(st.integers(20, 4000), min_size=2, max_size=8))
def test_a_requested_prefix_is_shared_in_the_simulation(of_block_size, share, lengths):
    """Requests one after the other find the blocks that lie in the common start of their own and an earlier prompt."""
    n = len(lengths)
    workload = Workload(1000.0 * np.arange(n), np.array(lengths), np.full(n, 1))
    sent = LoadSettings(shared_prefix=share).applied_to(workload)
    records, block_size = engine.simulate(sent, of_block_size).requests, of_block_size.kv.block_size
    common = [int(length * share) // block_size * block_size for length in lengths]
    expected = [min(own, max(common[:i], default=0)) for i, own in enumerate(common)]
    assert records.cached_tokens.tolist() == expected
