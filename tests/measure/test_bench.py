"""The load generator against a server that logs what it did: honest times, honest warnings, partial results."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scripted_server import EVERYTHING, Script, ScriptedServer

from lengthwise import metrics
from lengthwise.backend.openai_protocol import Capabilities, Server
from lengthwise.measure import read_records, write_records
from lengthwise.measure.load import LoadSettings, bench
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import UNCAPPED, Workload

ABLE = Capabilities(
    engine="vllm", model="toy", token_id_prompts=True, usage=True, usage_each=True, ignore_eos=True, min_tokens=True
)
NEAR_S = 0.06
"""How much later than the server sent it a client on a busy machine may read a piece."""


def requests(n=8, gap_s=0.0, prompt=20, output=6, **more):
    return Workload(np.arange(n) * gap_s, np.full(n, prompt), np.full(n, output), name="toy load", **more)


def served(script, workload, *, capabilities=ABLE, server_options=None, report=lambda *_: None, **options):
    """What was measured, and the server's own log."""
    with ScriptedServer(script) as server:
        requested = Server(server.url, **(server_options or {}))
        return bench(requested, workload, LoadSettings(**options), capabilities=capabilities, report=report), server


def doubted(measured, words):
    return any(words in warning for warning in measured.warnings)


def at(server, number):
    """When the server sent the token with this number of each stream, in the order of time."""
    return np.sort([sent.at_s[number] for sent in server.log])


def start_of(measured, server):
    """The zero of a run's times on the server's clock, or little later: no request can come before it is due."""
    return (np.sort([sent.came_s for sent in server.log]) - np.sort(measured.records.requests.arrival_s)).min()


def test_times_are_those_of_the_servers_log(stalls):
    script = Script(first_s=0.08, gap_s=0.02)
    measured, server = served(script, requests(8, 0.03))
    r = measured.records.requests
    assert (r.status == Status.FINISHED).all()
    assert (r.output_tokens == 6).all()
    assert (r.prompt_tokens == 20).all()
    zero_s, near_s = start_of(measured, server), NEAR_S + stalls.lost_s
    for received_s, number in ((r.first_token_s, 0), (r.finished_s, -1)):
        late_s = np.sort(received_s) + zero_s - at(server, number)
        assert (late_s >= 0).all(), "no token is read before it is sent"
        assert np.median(late_s) <= near_s, "a busy machine delays some"
    sent_s = (at(server, -1) - at(server, 0)) / 5
    assert abs(np.mean(metrics.request_column(r, "tpot_s")) - sent_s.mean()) <= near_s / 5
    pieces_s = np.array([sent.at_s for sent in server.log])
    gaps_s = np.diff(measured.tokens.at_s.reshape(8, 6))
    assert abs(np.median(gaps_s) - np.median(np.diff(pieces_s))) <= 0.01 + stalls.lost_s


def test_the_gaps_are_one_less_than_the_tokens_whatever_a_piece_holds():
    for together in (1, 4):
        measured, _ = served(Script(together=together), requests(5, output=9))
        assert measured.records.gaps.total == 5 * 8
        assert measured.records.gaps.histogram.sum() == 5 * 8
        assert measured.tokens.tokens.sum() == 5 * 9
        assert not any("token" in warning for warning in measured.warnings)


def test_a_stall_shows_in_requests_that_were_due_meanwhile(stalls):
    """Coordinated omission: requests due while the server sleeps wait, though none of them was sent."""
    n, gap_s, start_s, stall_s = 50, 0.05, 0.5, 1.0
    measured, server = served(Script(pauses=((start_s, stall_s),)), requests(n, gap_s, output=1))
    ttft_s = metrics.request_column(measured.records.requests, "ttft_s")
    zero_s, near_s = start_of(measured, server), NEAR_S + stalls.lost_s
    awake_s = server.log[0].came_s + start_s + stall_s - zero_s
    due_s = measured.records.requests.arrival_s
    inside = (due_s > awake_s - stall_s + NEAR_S) & (due_s < awake_s - NEAR_S)
    late_s = ttft_s[inside] - (awake_s - due_s[inside])
    assert inside.sum() > 5
    assert (late_s >= 0).all(), "nothing is sent before the server is awake"
    assert np.median(late_s) < near_s
    assert np.median(ttft_s[~inside]) < near_s


def test_latencies_count_from_when_a_request_was_due_even_where_the_client_is_late():
    """A client whose thread is held up sends late; that is in the latencies, in the facts, and in a warning."""
    blocked_s = []

    def reported(done, _of):
        if done == 3:  # within the loop: nothing can be sent meanwhile
            blocked_s.append(time.perf_counter())
            time.sleep(0.5)

    measured, _ = served(Script(), requests(30, 0.02, output=1), report=reported)
    assert blocked_s
    ttft_s = metrics.request_column(measured.records.requests, "ttft_s")
    assert ttft_s.max() > 0.35
    assert measured.metadata["client"]["late_s"]["max"] > 0.35
    assert doubted(measured, "after they were due")


def test_a_closed_loop_never_exceeds_its_concurrency_and_fills_it():
    measured, server = served(Script(first_s=0.01, gap_s=0.005), requests(30), concurrency=4)
    assert server.max_at_once == 4
    assert len(server.log) == 30
    r = measured.records.requests
    assert np.all(np.diff(r.arrival_s) >= 0)
    assert measured.workload.concurrency == 4


def test_an_open_loop_does_not_wait_for_answers():
    _, server = served(Script(gathers=20), requests(20, output=1))
    assert server.max_at_once == 20


def test_rate_and_concurrency_replace_the_arrivals():
    measured, _ = served(Script(), requests(20, output=1), rate_rps=100.0, seed=3)
    arrival_s = measured.workload.arrival_s
    again, _ = served(Script(), requests(20, output=1), rate_rps=100.0, seed=3)
    assert (arrival_s == again.workload.arrival_s).all()
    assert 0.05 < arrival_s[-1] < 0.6
    with pytest.raises(InputError, match="excludes"):
        LoadSettings(rate_rps=1.0, concurrency=1)


def test_prompts_are_unique_of_exact_length_and_the_same_for_a_seed_and_a_salt():
    prompts = []
    for seed, salt in ((1, 5), (1, 5), (2, 5), (1, 6)):
        _, server = served(Script(), requests(10, prompt=33), seed=seed, salt=salt, concurrency=1)
        prompts.append([tuple(sent.body["prompt"]) for sent in server.log])
    assert {len(p) for p in prompts[0]} == {33}
    assert prompts[0] == prompts[1]
    assert len({p[:16] for ps in prompts[1:] for p in ps}) == 30


def test_a_run_repeats_to_the_byte_with_the_salt_in_its_record():
    first, one = served(Script(), requests(4), warmup_requests=1, concurrency=1)
    salt = first.metadata["arguments"]["salt"]
    again, two = served(Script(), requests(4), warmup_requests=1, concurrency=1, salt=salt)
    assert [sent.body for sent in one.log] == [sent.body for sent in two.log]
    assert again.metadata["arguments"] == first.metadata["arguments"]
    with pytest.raises(InputError, match="salt must be from 0"):
        LoadSettings(salt=-1)


def test_a_shared_prefix_is_shared_as_far_as_requested():
    _, server = served(Script(), requests(6, prompt=40), shared_prefix=0.5)
    prompts = [sent.body["prompt"] for sent in server.log]
    assert len({tuple(p[:20]) for p in prompts}) == 1
    assert len({tuple(p[20:]) for p in prompts}) == 6


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_where_ids_are_not_taken_words_are_as_long_by_the_servers_count(api):
    can = EVERYTHING - {"token_id_prompts", "tokenize"} - ({"completions"} if api == "chat" else set())
    measured, server = served(Script(can=can), requests(5, prompt=31), capabilities=None)
    assert (measured.records.requests.prompt_tokens == 31).all()
    assert [sent.prompt_tokens for sent in server.log[-5:]] == [31] * 5
    assert measured.metadata["prompts"] == "words"
    assert not doubted(measured, "prompts")


def test_the_workloads_own_texts_are_sent():
    texts = np.array(["a b c", "d e"], object)
    measured, server = served(Script(), requests(2, prompt=2, extra={"prompt": texts}), concurrency=1)
    assert [sent.body["prompt"] for sent in server.log] == ["a b c", "d e"]
    assert measured.records.requests.prompt_tokens.tolist() == [3, 2]
    assert doubted(measured, "prompts were not as long as requested")


def test_outputs_that_stop_by_themselves_are_recorded_as_received_and_warned_about():
    can = EVERYTHING - {"ignore_eos", "min_tokens"}
    measured, _ = served(Script(can=can, stops_at=3), requests(5, output=9), capabilities=None)
    assert (measured.records.requests.output_tokens == 3).all()
    assert (measured.workload.output_tokens == 9).all()
    assert measured.metadata["finish_reasons"] == {"stop": 5}
    assert doubted(measured, "outputs were not as long as requested (33 % of it)")


def test_without_exact_lengths_outputs_may_be_as_long_as_the_clients_limits():
    work = requests(3, output=4, max_tokens=np.array([9, 30, UNCAPPED]), ignore_eos=np.zeros(3, bool))
    measured, server = served(Script(stops_at=7), work, exact=False)
    assert [sent.body.get("max_tokens") for sent in server.log] == [9, 30, None]
    assert (measured.records.requests.output_tokens == 7).all()
    assert not measured.errors
    assert not doubted(measured, "outputs were not as long as requested")


def test_uncounted_chunks_of_several_tokens_are_warned_about():
    can = EVERYTHING - {"usage_each", "token_ids_each"}
    measured, _ = served(Script(can=can, together=3), requests(4, output=6), capabilities=None)
    assert (measured.records.requests.output_tokens == 6).all()
    assert measured.records.gaps.total == 4
    assert doubted(measured, "a chunk held several tokens")


@pytest.mark.parametrize("fault", ["lies", "lies of prompts"])
def test_an_impossible_usage_is_reported(fault):
    measured, _ = served(Script(faults={1: fault}), requests(5), concurrency=1)
    assert measured.errors == {"wrong usage": 1}
    assert (measured.records.requests.output_tokens == 6).all()


def test_each_failure_is_counted_by_name_and_the_rest_goes_on():
    faults = {1: "http 429", 2: "http 500", 3: "malformed", 4: "stalls", 5: "closes", 6: "server error"}
    measured, _ = served(Script(faults=faults), requests(12), concurrency=1, server_options={"stall_s": 0.3})
    assert measured.errors == {
        "http 429": 1, "http 500": 1, "malformed": 1, "stalled": 1, "closed early": 1, "server error": 1
    }  # fmt: skip
    counts = np.bincount(measured.records.requests.status, minlength=4).tolist()
    assert counts == [6, 2, 1, 3]
    assert doubted(measured, "6 of 12 requests failed")
    assert metrics.summarize(measured.records).counts.finished == 6


def test_a_slow_header_counts_into_the_first_token():
    measured, _ = served(Script(fault="slow header"), requests(2, output=1))
    assert (metrics.request_column(measured.records.requests, "ttft_s") > 0.2).all()


def test_a_server_that_dies_midway_leaves_a_marked_partial_run(tmp_path):
    script = Script(gap_s=0.01, faults={20: "dies"})
    measured, server = served(script, requests(400, 0.02), give_up_after=5)
    r = measured.records.requests
    answered = sum(len(sent.at_s) == 6 for sent in server.log)
    assert 0 < (r.status == Status.FINISHED).sum() <= answered
    assert measured.errors["refused"] >= 1
    assert doubted(measured, "a partial run, ended by 5 failures in a row")
    counts = metrics.summarize(measured.records).counts
    assert counts.arrivals < 400
    write_records(measured, tmp_path / "partial.parquet")
    assert read_records(tmp_path / "partial.parquet").warnings == measured.warnings


def test_a_time_limit_keeps_partial_results(stalls):
    measured, server = served(Script(gap_s=0.05), requests(100, 0.05, output=10), time_limit_s=1.0)
    status = measured.records.requests.status
    answered = sum(sent.at_s[-1] <= server.log[0].came_s + 0.9 for sent in server.log if len(sent.at_s) == 10)
    assert (status == Status.FINISHED).sum() >= answered * (stalls.lost_s < 0.1)
    assert (status == Status.UNFINISHED).any()
    assert 1.0 - 0.01 <= measured.records.end_s < 1.3 + stalls.lost_s
    assert doubted(measured, "the time limit of 1 s")
    assert not measured.errors


def test_ctrl_c_keeps_partial_results():
    def reported(done, _of):
        if done == 5:
            os.kill(os.getpid(), signal.SIGINT)

    measured, _ = served(Script(), requests(200, 0.05, output=2), report=reported)
    finished = int((measured.records.requests.status == Status.FINISHED).sum())
    assert 2 < finished < 100
    assert doubted(measured, "an interruption")


def test_warm_up_requests_are_sent_and_not_counted():
    measured, server = served(Script(), requests(4), warmup_requests=3)
    assert len(server.log) == 7
    assert len(measured.records.requests.arrival_s) == 4
    assert len({tuple(sent.body["prompt"]) for sent in server.log}) == 7


def test_the_servers_metrics_are_recorded_every_second(stalls):
    measured, server = served(Script(), requests(3, 0.6, output=1), scrape=True)
    columns = measured.metadata["metrics"]
    n = len(columns["at_s"])
    assert 2 <= n <= 2 + stalls.lost_s
    assert all(0 <= running <= server.max_at_once for running in columns["vllm:num_requests_running"])
    assert columns["vllm:iteration_tokens_total_sum"] == [12.0] * n
    assert columns['vllm:iteration_tokens_total_bucket{le="1"}'] == [3.0] * n
    assert not [name for name in columns if name.startswith("process")]
    assert all(0 < took_s < 0.6 + stalls.lost_s for took_s in columns["took_s"])


def test_what_was_measured_goes_to_a_file_and_back(tmp_path):
    measured, _ = served(Script(), requests(3), scrape=True)
    write_records(measured, tmp_path / "m.parquet")
    again = read_records(tmp_path / "m.parquet")
    assert (again.metadata, again.warnings, again.source) == (measured.metadata, measured.warnings, "bench")
    assert (again.tokens.at_s == measured.tokens.at_s).all()
    assert again.metadata["engine"] == "vllm"
