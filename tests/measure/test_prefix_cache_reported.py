"""What a server finds in its prefix cache is not computed: reported, warned about, and not calibrated to."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scripted_server import EVERYTHING, Script, ScriptedServer

from lengthwise.measure.calibration.measured_runs import split_of
from lengthwise.measure.load import LoadSettings, bench
from lengthwise.measure.prefix_cache import FOUND, LOOKED_UP, cached_between, prefix_warnings
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import SharedPrefixes, Workload


def requests(n=12, prompt=30, **more):
    return Workload(np.zeros(n), np.full(n, prompt), np.full(n, 3), name="toy load", **more)


def runs_of(count, workload, can=EVERYTHING, **options):
    """Runs one after another against one server, which keeps what it has seen."""
    with ScriptedServer(Script(caches=True, can=can)) as server:
        return [bench(server.url, workload, LoadSettings(**options)) for _ in range(count)]


def doubted(measured, words):
    return any(words in warning for warning in measured.warnings)


@pytest.mark.parametrize("without", ["", "token_id_prompts"])
def test_prompts_of_one_run_answer_none_of_the_next(without):
    """Three loads of one seed, as a calibration asks for: lengths and arrivals are the same, prompts are not."""
    runs = runs_of(3, requests(), EVERYTHING - {without}, rate_rps=200.0, seed=1)
    for run in runs:
        assert run.metadata["prefix_cache"] == {"looked_up_tokens": 12 * 30, "found_tokens": 0}
        assert (run.workload.arrival_s == runs[0].workload.arrival_s).all()
        assert not doubted(run, "prefix cache")
    assert len({run.metadata["arguments"]["salt"] for run in runs}) == 3


def test_a_server_that_knows_the_prompts_is_warned_about():
    first, again = runs_of(2, requests(), concurrency=2, salt=7)
    assert not doubted(first, "prefix cache")
    assert again.metadata["prefix_cache"] == {"looked_up_tokens": 12 * 30, "found_tokens": 12 * 24}
    assert doubted(again, "the server had 288 of 360 prompt tokens (80.0 %) in its prefix cache")
    assert doubted(again, "send prompts that are new to it (another salt), or start it without")


def test_texts_with_a_common_start_are_warned_about_and_no_salt_is_proposed():
    texts = np.array(["a b c d e f g h i j", "a b c d e f g h k l"], object)
    (run,) = runs_of(1, requests(2, prompt=10, extra={"prompt": texts}), concurrency=1)
    assert doubted(run, "8 of 20 prompt tokens (40.0 %) in its prefix cache")
    assert not doubted(run, "salt")


def test_a_requested_shared_prefix_is_found_within_its_run_without_a_warning():
    for run in runs_of(2, requests(6, prompt=40), concurrency=1, shared_prefix=0.5):
        assert run.metadata["prefix_cache"]["found_tokens"] == 5 * 16  # whole blocks of 20; the first computes them
        assert not doubted(run, "prefix cache")


@pytest.mark.parametrize("without", ["", "token_id_prompts"])
def test_prompts_share_the_prefixes_of_the_workload_and_nothing_else(without):
    shared = SharedPrefixes(8, np.array([0, 2, 4, 6]), np.array([1, 2, 1, 3, 1, 2]))
    for run in runs_of(2, requests(3, prefixes=shared), EVERYTHING - {without}, concurrency=1):
        assert run.metadata["prefix_cache"] == {"looked_up_tokens": 3 * 30, "found_tokens": 0 + 8 + 16}
        assert run.workload.prefixes is not None
        assert not doubted(run, "prefix cache")


def test_servers_without_prefix_cache_counters_leave_no_fact():
    (run,) = runs_of(1, requests(2), EVERYTHING - {"metrics"})
    assert "prefix_cache" not in run.metadata


def test_counters_are_reported_by_their_growth_and_not_after_a_reset():
    looked_up, found = LOOKED_UP[0], FOUND[0]
    before = {looked_up: 100.0, found: 40.0}
    reported = cached_between(before, {looked_up: 300.0, found: 50.0, FOUND[1]: 5.0})
    assert reported == {"looked_up_tokens": 200.0, "found_tokens": 15.0}
    assert cached_between(before, {looked_up: 20.0, found: 0.0}) is None
    assert cached_between({}, {"other_total": 3.0}) is None
    assert cached_between({}, {LOOKED_UP[1]: 80.0}) == {"looked_up_tokens": 80.0, "found_tokens": 0.0}


SHARED = {"arguments": {"shared_prefix": 0.25}}
SCRAPED = {"metrics": {"at_s": [0.0, 1.0, 2.0], LOOKED_UP[0]: [0.0, None, 1000.0], FOUND[0]: [0.0, None, 31.0]}}
COUNTED = {"prefix_cache": {"looked_up_tokens": 1000.0, "found_tokens": 600.0}}


class TestCalibrations:
    """Simulated prompts are computed in full, so that what a cache saved would go into the work's factor."""

    @pytest.mark.parametrize(
        ("metadata", "report"),
        [
            (SHARED, "have 25 % of their tokens in common"),
            (SHARED | COUNTED, r"in common \(shared prefix\) \(the server had 600 of 1,000 prompt tokens"),
            (COUNTED, r"the server had 600 of 1,000 prompt tokens \(60\.0 %\)"),
            (SCRAPED, r"the server had 31 of 1,000 prompt tokens \(3\.1 %\)"),
        ],
    )
    def test_refuse_runs_of_shared_prefixes_unless_warnings_are_allowed(self, run, deployment, metadata, report):
        with pytest.raises(InputError, match=f"{report}.*--allow-warnings"):
            split_of([replace(run, metadata=metadata)], deployment, 0.3, ())
        assert split_of([replace(run, metadata=metadata)], deployment, 0.3, ["warnings"]).fitted

    @pytest.mark.parametrize(
        "metadata",
        [
            {"arguments": {"shared_prefix": 0.0, "seed": 1}},
            {"prefix_cache": {"looked_up_tokens": 0.0, "found_tokens": 0.0}},
            {"prefix_cache": {"looked_up_tokens": 1000.0, "found_tokens": 30.0}},
            COUNTED | {"prefix_cache": {"looked_up_tokens": 1000.0, "found_tokens": 0.0}} | SCRAPED,
            {"metrics": {"at_s": [0.0, 1.0], "vllm:num_requests_running": [1.0, 2.0]}},
        ],
    )
    def test_take_runs_whose_prompts_were_computed(self, run, deployment, metadata):
        assert split_of([replace(run, metadata=metadata)], deployment, 0.3, ()).fitted

    def test_repeat_the_warning_of_the_run_only_once(self):
        _, again = runs_of(2, requests(), concurrency=2, salt=7)
        assert prefix_warnings(again) == []
        assert len(prefix_warnings(replace(again, warnings=()))) == 1
