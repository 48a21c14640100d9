"""What a calibration refuses: runs of something else, doubtful ones, too few requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_runs import LIMITS, measured, requests

from lengthwise import engine
from lengthwise.measure.calibration import calibrate
from lengthwise.measure.calibration.measured_runs import (
    check_runs,
    client_was_disturbed,
    split_of,
    sustained_concurrency,
)
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Status


class TestRefusals:
    def test_a_run_given_twice(self, run, deployment):
        for runs, holdout in (([run], [run]), ([run, run, run], 0.3)):
            with pytest.raises(InputError, match="each run must be given once"):
                calibrate(runs, deployment, holdout=holdout)

    @pytest.mark.parametrize(
        ("metadata", "report"),
        [
            ({"model": "meta-llama/Meta-Llama-3-70B"}, "model meta-llama/Meta-Llama-3-70B"),
            ({"model": "/models/qwen2.5-7b"}, "model /models/qwen2.5-7b"),
            ({"deployment": {"model": "llama-3-8b", "gpu": "A100-80GB", "tp": 1}}, "GPU A100-80GB"),
            ({"deployment": {"gpu": "H100", "tp": 4}}, "tp 4"),
        ],
    )
    def test_records_of_another_model_or_gpu(self, run, deployment, metadata, report):
        with pytest.raises(InputError, match=f"{report}.*--allow-warnings"):
            split_of([replace(run, metadata=metadata)], deployment, 0.3, ())
        assert split_of([replace(run, metadata=metadata)], deployment, 0.3, ["warnings"]).fitted

    @pytest.mark.parametrize("served", ["tiny", "/models/mine", "meta-llama/Meta-Llama-3-8B-Instruct"])
    def test_an_uninformative_served_name_raises_no_warning(self, run, deployment, served):
        assert split_of([replace(run, metadata={"model": served})], deployment, 0.3, ()).fitted

    def test_simulated_runs(self, run, deployment):
        with pytest.raises(InputError, match="simulated runs would only repeat the simulator"):
            calibrate([replace(run, source="simulate")], deployment)
        assert calibrate([replace(run, source="simulate")], deployment, allow=["simulated"], fit=["work"]).fitted

    def test_warnings_refuse_a_run(self, run, deployment):
        with pytest.raises(InputError, match="the client was late"):
            calibrate([replace(run, warnings=("the client was late",))], deployment)
        with pytest.raises(InputError, match="3 requests failed of timeout"):
            calibrate([replace(run, errors={"timeout": 3})], deployment)
        assert calibrate([replace(run, warnings=("late",))], deployment, allow=["warnings"], fit=["work"]).fitted

    def test_a_late_client_only_where_the_fit_could_feel_it(self, run, deployment):
        """One request in a hundred left a little late from an idle loop: reported, and accepted."""
        r, n = run.records.requests, len(run.records.requests.arrival_s)
        ttft_s = float(np.nanmedian(r.first_token_s - r.arrival_s))
        client = {"late_doubt": "the client was late", "cpu_share": 0.08, "loop_lag": {"surely_often": False}}

        def late_by(share, **changes):
            late_s = np.zeros(n)
            late_s[::40] = share * ttft_s
            metadata = {"client": client | changes}
            return replace(run, warnings=("the client was late",), client_s=late_s, metadata=metadata)

        assert not client_was_disturbed(run)
        assert not client_was_disturbed(late_by(0.3))
        taken = split_of([late_by(0.3)], deployment, 0.3, ())
        assert any("the client was late" in note and "so that the run was used" in note for note in taken.notes)
        saturated = {"surely_often": True}
        for doubtful in (late_by(3.0), late_by(0.3, cpu_share=0.9), late_by(0.3, loop_lag=saturated)):
            assert client_was_disturbed(doubtful)
            with pytest.raises(InputError, match="the client was late"):
                split_of([doubtful], deployment, 0.3, ())
        other = replace(late_by(0.3), warnings=("the client was late", "a partial run"))
        with pytest.raises(InputError, match="it has these: a partial run"):
            split_of([other], deployment, 0.3, ())

    @pytest.mark.parametrize("late_s", [-10.0, -0.05])
    def test_clocks_that_disagree(self, run, deployment, late_s):
        """An engine's clock that is behind the client's: some first tokens come before their requests."""
        r = run.records.requests
        moved = replace(r, first_token_s=r.first_token_s + late_s, finished_s=r.finished_s + late_s)
        skewed = replace(run, records=replace(run.records, requests=moved))
        with pytest.raises(InputError, match=r"clocks disagree: .* before they arrived"):
            split_of([skewed], deployment, 0.3, ())
        if late_s > -1:  # some TTFTs are left
            assert split_of([skewed], deployment, 0.3, ["warnings"]).fitted
            return
        with pytest.raises(InputError, match=r"all 120 come before them, by up to 9\.98 s"):
            split_of([skewed], deployment, 0.3, ["warnings"])

    def test_what_may_be_allowed_is_named(self, run, deployment):
        with pytest.raises(InputError, match="allow takes warnings, simulated"):
            calibrate([run], deployment, allow=["all"])

    def test_too_few_requests(self, deployment):
        with pytest.raises(InputError, match="50 finished requests or more to fit to; there are 42"):
            calibrate([measured(requests(n=60), deployment)], deployment)
        with pytest.raises(InputError, match="10 finished requests or more to report on; there are 4"):
            calibrate([measured(requests(n=80), deployment)], deployment, holdout=0.05)

    def test_nothing_to_hold_out(self, run, deployment):
        for holdout in (0.0, 1.0, []):
            with pytest.raises(InputError, match="something to hold out"):
                calibrate([run], deployment, holdout=holdout)

    def test_a_deployment_that_takes_less(self, run):
        short = engine.deploy("llama-3-8b", "H100", limits=replace(LIMITS, max_model_len=2048))
        with pytest.raises(InputError, match=r"takes 2048 tokens a request \(max_model_len\)"):
            calibrate([run], short)

    def test_more_running_than_the_deployment_lets(self, run):
        few = engine.deploy("llama-3-8b", "H100", limits=replace(LIMITS, max_num_seqs=4))
        with pytest.raises(InputError, match="at most 4 requests run at a time"):
            calibrate([run], few)

    def test_answers_that_a_client_read_late_are_no_more_running(self, run, deployment):
        """It stood still for a moment: who ended meanwhile seems to run on until then, beside who began."""
        r = run.records.requests
        max_num_seqs = sustained_concurrency(r.first_token_s, r.finished_s, 0.0)
        limits = replace(LIMITS, max_num_seqs=max_num_seqs)
        running = [((r.first_token_s <= at_s) & (r.finished_s > at_s)).sum() for at_s in r.first_token_s]
        peak_s = r.first_token_s[np.argmax(running)]
        late = (r.finished_s > peak_s - 1.5) & (r.finished_s <= peak_s)
        shown = replace(r, finished_s=np.where(late, peak_s + 1e-3, r.finished_s))
        assert sustained_concurrency(shown.first_token_s, shown.finished_s, 0.0) > 1.02 * max_num_seqs + 1
        seen = replace(run, records=replace(run.records, requests=shown))
        check_runs([seen], ["run"], replace(deployment, limits=limits), ("warnings",))

    def test_records_of_another_workload(self, run, deployment):
        other = replace(run.workload, prompt_tokens=run.workload.prompt_tokens[::-1])
        with pytest.raises(InputError, match="do not belong together"):
            calibrate([replace(run, workload=other)], deployment)

    def test_a_run_of_which_nothing_came(self, run, deployment):
        r = replace(run.records.requests, status=np.full(len(run.workload), Status.REJECTED, np.int8))
        with pytest.raises(InputError, match="requests that an engine worked on"):
            calibrate([replace(run, records=replace(run.records, requests=r))], deployment)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=12), st.sampled_from([0.0, 0.05, 0.3]))
def test_how_many_share_a_moment_for_a_share_of_the_time(intervals, share):
    start_s = np.array([start for start, _ in intervals], float)
    end_s = start_s + np.array([lasts for _, lasts in intervals], float)
    counts = [int(((start_s <= t) & (end_s > t)).sum()) for t in np.arange(30)]
    busy = sum(count > 0 for count in counts)
    held_out = [n for n in range(1, len(intervals) + 1) if sum(count >= n for count in counts) >= max(1, share * busy)]
    assert sustained_concurrency(start_s, end_s, share) == max(held_out, default=0)
