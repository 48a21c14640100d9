from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lengthwise.metrics import Counts, summarize
from lengthwise.report import Result, what_binds
from lengthwise.report.binding import bottleneck_of
from lengthwise.report.summary_table import rows
from lengthwise.schema.estimate import Estimate


@pytest.fixture
def summary(results):
    """Busy all the time, half the time in linear layers, nothing else outstanding."""
    shares = dict.fromkeys(results[0].summary.hardware.time_shares, Estimate(0.0))
    shares |= {"linear": Estimate(0.9), "host": Estimate(0.1)}
    hardware = dataclasses.replace(
        results[0].summary.hardware,
        busy_share=Estimate(1.0),
        mfu=Estimate(0.3),
        mbu=Estimate(0.2),
        kv_utilization=Estimate(0.5),
        time_shares=shares,
    )
    arrivals = results[0].summary.counts.arrivals
    counts = Counts(arrivals, arrivals, rejected=0, timed_out=0, unfinished=0, preemptions=0)
    window_s = Estimate(100 * results[0].summary.jct_s.mean.value)
    return dataclasses.replace(results[0].summary, hardware=hardware, counts=counts, window_s=window_s)


def having(summary, **changes: float):
    """The summary with other hardware numbers; a share's name changes the share."""
    h = summary.hardware
    shares = {k: Estimate(changes.pop(k)) if k in changes else v for k, v in h.time_shares.items()}
    plain = {k: Estimate(v) for k, v in changes.items()}
    h = dataclasses.replace(h, replica_busy_share=(plain.get("busy_share", h.busy_share),))
    return dataclasses.replace(summary, hardware=dataclasses.replace(h, time_shares=shares, **plain))


@pytest.mark.parametrize(
    ("changes", "resource", "states"),
    [
        ({}, "compute", "30 % of the peak compute"),
        ({"mbu": 0.6}, "memory bandwidth", "60 % of the memory bandwidth"),
        ({"kv_utilization": 0.95}, "KV memory", "95 % full"),
        ({"linear": 0.4, "host": 0.6}, "host", "host (scheduling, input preparation) takes 60 % of the time"),
        ({"linear": 0.5, "communication": 0.3, "send": 0.1}, "network", "takes 40 % of the time"),
        (
            {"mfu": 0.01, "mbu": 0.06, "linear": 0.6, "host": 0.25},
            "kernels",
            "most of their time goes to linear layers (60 %) and the host (25 %)",
        ),
        (
            {"mfu": 0.01, "mbu": 0.06, "linear": 0.3, "host": 0.7},
            "host",
            "takes 70 % of the time, and neither roof is near (compute 1 %, memory bandwidth 6 %)",
        ),
        ({"mbu": 1.3}, "memory bandwidth", "More than 100 % exceeds the catalog's peak"),
        ({"linear": 0.4, "idle": 0.5}, "pipeline", "take 50 % of the stages' time"),
        ({"busy_share": 0.25, "idle": 0.75, "linear": 0.2, "host": 0.02}, "idle", "75 % of the time"),
    ],
)
def test_each_resource_binds_when_it_should(summary, changes, resource, states) -> None:
    binding = what_binds(having(summary, **changes))
    assert binding.resource == resource
    assert states in binding.description
    assert binding.description[0].isupper()
    assert binding.description.endswith(".")


def test_an_idle_replica_beside_a_queue_is_an_imbalance(summary) -> None:
    waits_s = dataclasses.replace(summary.queueing_delay_s, mean=Estimate(0.9 * summary.ttft_s.mean.value))
    queued = having(dataclasses.replace(summary, queueing_delay_s=waits_s), busy_share=0.51)
    pair = dataclasses.replace(queued.hardware, replica_busy_share=(Estimate(0.99), Estimate(0.03)))
    found = what_binds(dataclasses.replace(queued, hardware=pair))
    assert found.resource == "imbalance"
    assert "runs steps 99 % of the time" in found.description
    assert "room for more load" not in found.description
    even = dataclasses.replace(queued.hardware, replica_busy_share=(Estimate(0.52), Estimate(0.5)))
    assert what_binds(dataclasses.replace(queued, hardware=even)).resource == "idle"


def test_a_queue_before_busy_prefill_replicas_is_theirs(summary) -> None:
    waits_s = dataclasses.replace(summary.queueing_delay_s, mean=Estimate(0.9 * summary.ttft_s.mean.value))
    queued = having(dataclasses.replace(summary, queueing_delay_s=waits_s), busy_share=0.9)

    def of(one, *busy: float):
        hardware = dataclasses.replace(one.hardware, replica_busy_share=tuple(map(Estimate, busy)))
        return what_binds(dataclasses.replace(one, hardware=hardware), prefill_ranks=2)

    found = of(queued, 1.0, 0.96, 0.75)
    assert found.resource == "prefill replicas"
    assert found.description.startswith("Requests wait for prefill replicas, and more of them would shorten the queue")
    assert found.description.endswith("Steps run 98 % of the time on prefill replicas, 75 % on decode replicas.")
    assert of(queued, 0.8, 0.8, 1.0).resource == "compute"
    assert of(having(summary), 1.0, 1.0, 0.75).resource == "compute", "without a queue"
    assert of(having(queued, kv_utilization=0.88), 1.0, 0.96, 0.75).resource == "KV memory", "full, of either side"


def test_preemptions_are_a_sign_of_full_memory(summary) -> None:
    many = dataclasses.replace(summary.counts, preemptions=summary.counts.arrivals)
    assert what_binds(dataclasses.replace(summary, counts=many)).resource == "KV memory"


def test_a_queue_that_dominates_the_ttft_is_named(summary) -> None:
    def waits(mean_s: float, **model: float):
        queueing = dataclasses.replace(summary.queueing_delay_s, mean=Estimate(mean_s, **model))
        ttft = dataclasses.replace(summary.ttft_s, mean=Estimate(1.0))
        return what_binds(dataclasses.replace(summary, queueing_delay_s=queueing, ttft_s=ttft)).description

    assert "keeps up with the load: requests wait 200 ms" in waits(0.2)
    slow_s = 11.5 + summary.jct_s.mean.value
    reported = waits(0.2, model_low=0.1, model_high=slow_s)
    assert "It keeps up" not in reported
    assert f"but up to {slow_s:.1f} s within the cost model's error: it may not keep up with the load" in reported
    assert "Requests wait 800 ms on average before they are scheduled, 80 % of their TTFT" in waits(0.8)


def test_without_hardware_nothing_is_claimed(summary) -> None:
    assert what_binds(dataclasses.replace(summary, hardware=None)).resource == "unknown"


def serving(summary, **buckets: int):
    """Return the summary with requests that were not served; the rest finished."""
    missing = buckets["rejected"] if "rejected" in buckets else sum(buckets.values())
    counts = dataclasses.replace(summary.counts, finished=summary.counts.arrivals - missing, **buckets)
    return dataclasses.replace(summary, counts=counts)


@pytest.mark.parametrize("busy", [0.2, 1.0])
def test_unserved_requests_come_first_and_rule_out_praise(summary, busy) -> None:
    most = summary.counts.arrivals * 98 // 100
    binding = what_binds(having(serving(summary, timed_out=most), busy_share=busy, mbu=0.15))
    assert binding.warning == (f"98 % of requests were not served ({most:,} timed out); latencies cover the rest.")
    assert not any(rosy in binding.description for rosy in ("keeps up", "room", "more load"))
    none = what_binds(serving(summary, timed_out=summary.counts.arrivals))
    assert none.warning.startswith("No request was served")
    assert what_binds(summary).warning == ""


@pytest.mark.parametrize(
    ("cause", "resource", "states"),
    [
        ("rejected_over_kv_memory", "KV memory", "memory policy refuses the prompts"),
        ("rejected_too_long", "limits", "max_model_len"),
        ("rejected_over_token_budget", "limits", "max_num_batched_tokens"),
    ],
)
def test_the_cause_of_most_rejections_binds_even_if_gpus_idle(summary, cause, resource, states) -> None:
    many = summary.counts.arrivals * 9 // 10
    binding = what_binds(having(serving(summary, rejected=many, **{cause: many}), busy_share=0.1))
    assert binding.resource == resource
    assert states in binding.description


def test_advice_on_batches_matches_what_limits_them(summary) -> None:
    def advice(wait_s: float, max_batch_seqs: float, **hardware: float) -> str:
        queueing = dataclasses.replace(summary.queueing_delay_s, mean=Estimate(wait_s))
        ttft = dataclasses.replace(summary.ttft_s, mean=Estimate(1.0))
        waiting = dataclasses.replace(summary, queueing_delay_s=queueing, ttft_s=ttft)
        made = having(waiting, mbu=0.6, batch_seqs=10.0, **hardware)
        return what_binds(made, max_batch_seqs=max_batch_seqs).description

    assert "the load sets the batch, and more load per replica" in advice(0.1, 256)
    assert "larger batches would share" in advice(0.9, 256)
    assert "batches are at max_num_seqs" in advice(0.1, 10)
    idle = advice(0.9, 256, busy_share=0.3, idle=0.7, linear=0.25, host=0.02)
    assert "room for more load" in idle
    assert "larger batches" not in idle


def waiting(summary, **changes: float):
    """The summary with long waits for admission."""
    queueing = dataclasses.replace(summary.queueing_delay_s, mean=Estimate(0.9))
    ttft = dataclasses.replace(summary.ttft_s, mean=Estimate(1.0))
    return having(dataclasses.replace(summary, queueing_delay_s=queueing, ttft_s=ttft), mbu=0.6, **changes)


def test_admission_that_reserves_memory_binds_where_batches_have_room(summary) -> None:
    made = waiting(summary, batch_seqs=10.0)
    assert what_binds(made, max_batch_seqs=256).resource == "memory bandwidth"
    reserved = what_binds(made, max_batch_seqs=256, reserves=True)
    assert reserved.resource == "KV memory"
    assert "requests wait while 50 % of it is in use and batches have 10 sequences" in reserved.description
    assert what_binds(made, max_batch_seqs=10, reserves=True).resource == "memory bandwidth", "the limit binds"
    assert what_binds(having(summary, mbu=0.6), reserves=True).resource == "memory bandwidth", "nothing waits"


def test_neither_short_runs_nor_loads_at_the_capacity_show_room(summary) -> None:
    idle = {"busy_share": 0.3, "idle": 0.7, "linear": 0.25, "host": 0.02}
    short = dataclasses.replace(summary, window_s=Estimate(3 * summary.jct_s.mean.value))
    for binding in (what_binds(short), what_binds(having(short, **idle))):
        assert "The run takes 3 mean JCTs: too short to show a steady load." in binding.description
        assert "keeps up" not in binding.description
    for binding in (what_binds(having(summary, mbu=0.6, **one), load="capacity") for one in ({}, idle)):
        assert not any(rosy in binding.description for rosy in ("keeps up", "room", "more load"))
    assert "room" not in what_binds(having(short, **idle)).description


def test_only_an_open_loop_is_reported_as_kept_up_with(toy) -> None:
    def description(arrival_s=None, text: str = "") -> str:
        made = toy.records(100, rate=1.0, odd=False)
        if arrival_s is not None:
            requests = dataclasses.replace(made.requests, arrival_s=arrival_s(made.requests))
            made = dataclasses.replace(made, requests=requests)
        summary = summarize(toy.records(100, rate=1.0, odd=False), toy.deployment())
        return bottleneck_of(Result("one", summary, made, toy.deployment(), text)).description

    def released(requests):
        return np.concatenate([np.zeros(10), np.sort(requests.finished_s)[:90]])

    assert "keeps up" in description()
    assert "keeps up" not in description(released)
    assert "keeps up" not in description(lambda r: np.zeros(len(r.status)))
    assert "keeps up" not in description(text="[workload]\nconcurrency = 8")
    assert "keeps up" in description(text="this is not TOML")


def test_a_delay_in_front_of_the_engine_is_no_queue(summary) -> None:
    """Every request has it, however idle the deployment is."""
    means = {"queueing_delay_s": 0.125, "ttft_s": 0.17, "jct_s": 2.0}
    times = {
        name: dataclasses.replace(getattr(summary, name), mean=Estimate(s, model_low=s, model_high=s + 0.4))
        for name, s in means.items()
    }
    made = dataclasses.replace(summary, **times)
    assert "wait 125 ms on average before they are scheduled, 74 % of their TTFT" in what_binds(made).description
    described = what_binds(made, queued_for_s=0.125, front_s=(0.123, 0.49)).description
    assert "It keeps up with the load: requests wait 2.00 ms on average, after 123 ms in front" in described
    # The table's queueing is the sum of both.
    described = what_binds(made, queued_for_s=0.125, front_s=(0.003, 0.003)).description
    both = "72 % of their TTFT, after 3.00 ms in front of the engine (Queueing is the sum)."
    assert f"wait 122 ms on average before they are scheduled, {both}" in described


def test_preemptions_by_rank_are_no_lack_of_memory(summary) -> None:
    """Requests of a better rank preempt without any shortage."""
    many = dataclasses.replace(summary.counts, preemptions=summary.counts.arrivals)
    moved = dataclasses.replace(summary, counts=many)
    assert what_binds(moved).resource == "KV memory"
    assert what_binds(moved, preempts_only_for_memory=False).resource == what_binds(summary).resource


def test_repeated_preemptions_do_not_count_as_keeping_up(summary) -> None:
    """MLFQ admits requests at once, and they wait after preemptions."""

    def described(preemptions: int, queued_for_s: float) -> str:
        counts = dataclasses.replace(summary.counts, preemptions=preemptions)
        means = {"queueing_delay_s": 0.006, "ttft_s": 0.1, "jct_s": 20.0}
        times = {name: dataclasses.replace(getattr(summary, name), mean=Estimate(s)) for name, s in means.items()}
        made = dataclasses.replace(summary, counts=counts, **times)
        return what_binds(made, preempts_only_for_memory=False, queued_for_s=queued_for_s).description

    many = summary.counts.arrivals
    assert "It keeps up with the load: requests wait 6.00 ms" in described(0, 0.006)
    moved = described(many, 14.9)
    assert "keeps up" not in moved
    assert "wait 14.9 s on average, 74 % of their JCT: 6.00 ms before they are first scheduled" in moved
    assert "keeps up" not in described(many, float("nan"))
    assert "keeps up" not in described(many // 20, 14.9)


def test_the_complete_wait_comes_from_the_records(toy) -> None:
    records = toy.records(100, rate=1.0, odd=False)
    moved = dataclasses.replace(records.requests, queued_for_s=np.full(100, 7.0), preemptions=np.full(100, 3, np.int32))
    made = dataclasses.replace(records, requests=moved)
    stays = toy.deployment()
    deployment = dataclasses.replace(stays, scheduler=dataclasses.replace(stays.scheduler, preemption="by_rank"))
    found = bottleneck_of(Result("one", summarize(made, deployment), made, deployment, "")).description
    assert "wait 7" in found
    assert "after preemptions" in found


def test_labels_say_that_batches_are_of_a_rank(results) -> None:
    def labels(dp: int) -> set[str]:
        made = []
        for one in results:
            deployed = one.deployment
            parallel = dataclasses.replace(deployed.parallel, dp=dp)
            made.append(dataclasses.replace(one, deployment=dataclasses.replace(deployed, parallel=parallel)))
        return {row.metric.label for row in rows(made)}

    assert labels(2) - labels(1) == {"Batch of a rank (dp)"}
