"""The conformance kit of policies passes what ships and catches what is broken."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lengthwise import _jit, policy
from lengthwise.engine import simulate
from lengthwise.testing import POLICY_CHECKS, check_policy, policies
from lengthwise.testing import policies as _policies

AXES = ("rank", "batching", "memory", "router", "preemption", "binning")
FAMILIES = (
    ("rank", "aged(weight=30)"),
    ("rank", "aged_gittins"),
    ("rank", "mlfq(quantum=8, levels=3)"),
    ("preemption", "worth(factor=0.5, max_preemptions=2)"),
    ("binning", "bins(boundaries=[8, 24])"),
)
BUILT_IN = [p for axis in AXES for p in policy.known(axis).values()]
ALL = [*BUILT_IN, *(policy.resolve(axis, text) for axis, text in FAMILIES)]
KERNEL = ("kernel_as_reference",)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ALL, ids=lambda p: f"{p.axis}-{p.name}")
def test_what_ships_passes(chosen):
    passed = check_policy(chosen, count=2, seed=len(chosen.name), skip=KERNEL)
    assert passed == [name for name in POLICY_CHECKS if name not in KERNEL]


@pytest.mark.slow
@pytest.mark.skipif(_jit.DISABLED, reason="nothing is compiled")
@pytest.mark.parametrize("text", ["srtf", "hrrn", "vtc", "aged(weight=30)"])
def test_ranks_pass_in_the_kernel_too(text):
    assert set(check_policy(policy.resolve("rank", text), count=4)) == set(POLICY_CHECKS)


@policy.rank
def sometimes_nan(prompt_tokens):
    return 0.0 * (1e300 * 1e300) if prompt_tokens > 500 else 1.0


@policy.rank
def divides(remaining_tokens, generated_tokens):
    return remaining_tokens / generated_tokens


@policy.rank
def tosses_a_coin(arrival_s):
    return arrival_s + random.random()


@policy.rank
def overflows(prompt_tokens):
    return float((prompt_tokens << 40) << 20)


@policy.rank
def by_text(arrival_s):
    return float({"key": str(arrival_s)}["key"].strip())


COUNTED = [0]


def counts(arrival_s):
    COUNTED[0] += 1
    return arrival_s + (COUNTED[0] % 977) * 1e-3


@policy.batching
def never_two(num_waiting, token_budget):
    return (1 if num_waiting == 1 else 0), token_budget, policy.CHUNKED


@policy.batching
def odd_flags(max_num_seqs, token_budget):
    return max_num_seqs, token_budget, 4096


@policy.batching
def stops_when_full(num_running, num_waiting, token_budget, max_num_seqs):
    return (0 if num_running == 0 and num_waiting > 900 else max_num_seqs), token_budget, policy.CHUNKED


@policy.memory
def takes_too_much(free_blocks):
    return free_blocks + 1


@policy.memory
def keeps_the_last_out(context_tokens, block_size, free_blocks, num_running):
    need = (context_tokens + block_size - 1) // block_size
    return need if need <= free_blocks and (num_running > 0 or context_tokens < 30) else -1


@policy.router
def beyond(waiting):
    return len(waiting)


@policy.preemption
def shrugs(waiting_key):
    return np.nan


@policy.binning(bins=2)
def third_of_two(predicted_tokens):
    return 2 if predicted_tokens > 20 else 0


BROKEN = [
    (sometimes_nan, "must return a finite key"),
    (divides, "must accept all arguments of its axis; it raised ZeroDivisionError"),
    (tosses_a_coin, "must return the same for the same arguments"),
    (policy.rank(counts), "must return the same for the same arguments"),
    (never_two, "must admit a request on an idle replica"),
    (odd_flags, "must return a sum of flags"),
    (stops_when_full, "must admit a request on an idle replica"),
    (takes_too_much, "blocks that are free"),
    (keeps_the_last_out, "must (run without an error|let every request finish)"),
    (beyond, "an existing replica"),
    (shrugs, "must return a number"),
    (third_of_two, "must return a bin from 0 to 1"),
]


@pytest.mark.parametrize(("broken", "report"), BROKEN, ids=lambda x: getattr(x, "name", None))
def test_what_is_broken_is_caught(broken, report):
    with pytest.raises(AssertionError, match=report) as caught:
        check_policy(broken, compiled=False)
    assert broken.name in str(caught.value)


@pytest.mark.skipif(_jit.DISABLED, reason="nothing is compiled")
def test_uncompilable_policies_and_differing_results_are_caught():
    with pytest.raises(AssertionError, match="'by_text' must compile"):
        check_policy(by_text)
    assert "compiles" not in check_policy(by_text, compiled=False, count=1)
    with pytest.raises(AssertionError, match="'overflows' must return the same compiled and interpreted"):
        check_policy(overflows)


def test_checks_can_be_skipped_and_a_non_policy_is_reported():
    passed = check_policy(odd_flags, skip=[n for n in POLICY_CHECKS if n != "deterministic"])
    assert passed == ["deterministic"]
    with pytest.raises(AssertionError, match="made by a decorator"):
        check_policy(lambda arrival_s: arrival_s)


def later_first(arrival_s):
    return -arrival_s


def test_a_violated_bound_would_be_detected(monkeypatch):
    """The engine gets no bound, the check gets one."""
    chosen = policy.rank(later_first)
    tried = _policies.policy_cases(chosen, 6, 0)
    plain = {id(world.workload): world for world in tried}
    monkeypatch.setattr(
        policies,
        "simulate",
        lambda workload, _, **options: simulate(workload, plain[id(workload)].deployment, **options),
    )
    with pytest.raises(AssertionError, match="no later arrival may overtake a request"):
        policies.waiting_is_bounded(chosen, tried)
