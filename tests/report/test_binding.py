from __future__ import annotations

import dataclasses

import pytest

from lengthwise.metrics import Estimate
from lengthwise.report import what_binds


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
    counts = dataclasses.replace(results[0].summary.counts, preemptions=0)
    return dataclasses.replace(results[0].summary, hardware=hardware, counts=counts)


def having(summary, **changes: float):
    """The summary with other hardware numbers; a share's name changes the share."""
    h = summary.hardware
    shares = {k: Estimate(changes.pop(k)) if k in changes else v for k, v in h.time_shares.items()}
    plain = {k: Estimate(v) for k, v in changes.items()}
    return dataclasses.replace(summary, hardware=dataclasses.replace(h, time_shares=shares, **plain))


@pytest.mark.parametrize(
    ("changes", "resource", "says"),
    [
        ({}, "compute", "30 % of the peak compute"),
        ({"mbu": 0.6}, "memory bandwidth", "60 % of the memory bandwidth"),
        ({"kv_utilization": 0.95}, "KV memory", "95 % full"),
        (
            {"linear": 0.4, "host": 0.6},
            "host",
            "host (scheduling, input preparation) takes 60 % of the time",
        ),
        ({"linear": 0.5, "communication": 0.3, "send": 0.1}, "network", "takes 40 % of the time"),
        ({"linear": 0.4, "idle": 0.5}, "pipeline", "take 50 % of the stages' time"),
        ({"busy_share": 0.25, "idle": 0.75, "linear": 0.2, "host": 0.02}, "idle", "75 % of the time"),
    ],
)
def test_each_resource_binds_when_it_should(summary, changes, resource, says) -> None:
    binding = what_binds(having(summary, **changes))
    assert binding.resource == resource
    assert says in binding.sentence
    assert binding.sentence[0].isupper()
    assert binding.sentence.endswith(".")


def test_preemptions_are_a_sign_of_full_memory(summary) -> None:
    many = dataclasses.replace(summary.counts, preemptions=summary.counts.arrived)
    assert what_binds(dataclasses.replace(summary, counts=many)).resource == "KV memory"


def test_a_queue_that_makes_the_ttft_is_told_from_one_that_does_not(summary) -> None:
    def waits(mean_s: float):
        queueing = dataclasses.replace(summary.queueing_delay_s, mean=Estimate(mean_s))
        ttft = dataclasses.replace(summary.ttft_s, mean=Estimate(1.0))
        return what_binds(dataclasses.replace(summary, queueing_delay_s=queueing, ttft_s=ttft)).sentence

    assert "keeps up with the load: requests wait 200 ms" in waits(0.2)
    assert "Requests wait 800 ms on average before they are scheduled, 80 % of their TTFT" in waits(0.8)


def test_without_hardware_nothing_is_claimed(summary) -> None:
    assert what_binds(dataclasses.replace(summary, hardware=None)).resource == "unknown"
