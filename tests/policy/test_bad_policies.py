"""A policy that misbehaves: one clear PolicyError from either engine, nothing of Numba's or Python's own."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from worlds import GPU, MODEL, NODE, cost_tables

from lengthwise import _jit, policy
from lengthwise.engine import simulate
from lengthwise.policy import CHUNKED
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import PolicyError
from lengthwise.schema.workload import Workload

ENGINES = ("kernel", "reference")
REQUESTS = Workload(np.arange(6) / 100, np.full(6, 80), np.full(6, 10), predicted_tokens=np.full(6, 10.0))

LONG = dataclasses.replace(REQUESTS, output_tokens=np.full(6, 60))


def run(engine, replicas=2, workload=REQUESTS, num_blocks=100, **axes):
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=64)
    deployment = Deployment(
        MODEL, GPU, NODE, Parallelism(1, 1, replicas), limits, Scheduler(**axes), cost_tables([4]),
        KvPlan(num_blocks, 16, 0.0, 0.0, 0.0, 0.0), max_model_len=300,
    )  # fmt: skip
    return simulate(workload, deployment, engine=engine)


def divides(arrival_s):
    return 1.0 / (arrival_s - arrival_s)


def raises(arrival_s):
    if arrival_s > 0.02:
        raise ValueError("I do not like late requests")
    return arrival_s


def not_a_number(arrival_s):
    return math.nan if arrival_s > 0.02 else arrival_s


def nothing(arrival_s):
    return None


def two_numbers(max_num_seqs):
    return max_num_seqs, 64


def four_numbers(max_num_seqs):
    return max_num_seqs, 64, CHUNKED, 0


def one_number(max_num_seqs):
    return max_num_seqs


def divides_when_busy(decodes, token_budget, max_num_seqs):
    return max_num_seqs // max(1 - decodes, 0), token_budget, CHUNKED


def admits_nobody(token_budget):
    return 0, token_budget, CHUNKED


def no_chunks(max_num_seqs):
    return max_num_seqs, 0, CHUNKED


def never_two(num_waiting, token_budget):
    return (1 if num_waiting == 1 else 0), token_budget, CHUNKED


def keeps_all(total_blocks):
    return -1


def more_than_all(total_blocks):
    return total_blocks + 1


def more_than_free(total_blocks, free_blocks):
    return total_blocks - 1


def one_too_far(waiting):
    return len(waiting)


def nowhere(waiting):
    return -1


def no_gain(waiting_key):
    return math.nan


def no_comparison(num_running):
    return 1.0 / (num_running - num_running)


def nothing_gained(waiting_key):
    return None


def a_bin_too_far(predicted_tokens):
    return 2


def a_bin_below(predicted_tokens):
    return -1


BAD = [
    ("rank", divides, "raised (ZeroDivisionError|RuntimeWarning)"),
    ("victim", divides, "raised (ZeroDivisionError|RuntimeWarning)"),
    ("rank", raises, "raised ValueError: I do not like late requests"),
    ("rank", not_a_number, "rank policy 'not_a_number'.*returned NaN for request 3; a key must be a number"),
    ("victim", not_a_number, "victim policy 'not_a_number' returned NaN for request"),
    ("rank", nothing, "rank policy 'nothing' must return a number|raised TypeError"),
    ("batching", two_numbers, "'two_numbers' (cannot be compiled|must return three whole numbers)"),
    ("batching", four_numbers, "'four_numbers' (cannot be compiled|must return three whole numbers)"),
    ("batching", one_number, "'one_number' (cannot be compiled|must return three whole numbers)"),
    ("batching", divides_when_busy, "raised (ZeroDivisionError|RuntimeWarning)"),
    ("batching", admits_nobody, "'admits_nobody' admits nothing on an idle replica.*no request would ever run"),
    ("batching", no_chunks, "'no_chunks' admits nothing on an idle replica.*tokens 0"),
    ("memory", keeps_all, "'keeps_all' refuses a request of one token on an idle replica"),
    ("memory", more_than_all, "'more_than_all' admitted a request that needs 101 blocks"),
    ("memory", more_than_free, "'more_than_free' admitted a request that needs 99 blocks"),
    ("router", one_too_far, "'one_too_far' chose replica 2; there are 2, from 0"),
    ("router", nowhere, "'nowhere' chose replica -1; there are 2, from 0"),
    ("preemption", no_gain, "'no_gain' returned NaN for waiting request [0-9]+; it must return a number"),
    ("preemption", no_comparison, "raised (ZeroDivisionError|RuntimeWarning)"),
    ("preemption", nothing_gained, "'nothing_gained' must return a number|raised TypeError"),
    ("binning", a_bin_too_far, "'a_bin_too_far' chose bin 2; there are 2, from 0"),
    ("binning", a_bin_below, "'a_bin_below' chose bin -1; there are 2, from 0"),
]


def last_come(arrival_s):
    return -arrival_s


DECORATORS = {"victim": policy.rank, "binning": policy.binning(bins=2)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("axis", "function", "report"), BAD, ids=lambda x: getattr(x, "__name__", None))
def test_one_clear_error(axis, function, report, engine):
    decorate = DECORATORS.get(axis) or getattr(policy, axis)
    short = {"num_blocks": 20, "replicas": 1, "workload": LONG} if axis == "victim" else {}
    if axis == "preemption":
        short = {"replicas": 1, "workload": LONG, "rank": policy.rank(last_come)}
    with pytest.raises(PolicyError, match=report) as caught:
        run(engine, **short, **{axis: decorate(function)})
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_that_waits_for_ever(engine):
    both = dataclasses.replace(REQUESTS, arrival_s=np.zeros(6))
    with pytest.raises(PolicyError, match=r"request 0 waits forever.*'never_two'.*80 prompt tokens"):
        run(engine, 1, both, batching=policy.batching(never_two))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "axes", [{"rank": "sjf"}, {"victim": "longest_remaining"}, {"memory": "predicted_peak"}], ids=str
)
def test_missing_predictions_are_reported(engine, axes):
    blind = dataclasses.replace(REQUESTS, predicted_tokens=None)
    name = next(iter(axes.values()))
    with pytest.raises(PolicyError, match=f"'{name}' needs predicted output lengths.*give predicted_tokens"):
        run(engine, workload=blind, **axes)


@pytest.mark.skipif(_jit.DISABLED, reason="nothing is compiled")
def test_what_cannot_be_compiled_runs_in_the_reference():
    @policy.rank
    def by_text(arrival_s):
        return float({"key": str(arrival_s)}["key"].strip())

    with pytest.raises(PolicyError, match=r"'by_text' cannot be compiled.*engine='reference'"):
        run("kernel", rank=by_text)
    plain, own = run("reference", rank="fcfs"), run("reference", rank=by_text)
    np.testing.assert_array_equal(own.requests.finished_s, plain.requests.finished_s)


@pytest.mark.parametrize("axis", ["rank", "batching", "memory", "router"])
def test_wrong_argument_names(axis):
    def peeks(output_tokens, arrival_time):
        return output_tokens

    with pytest.raises(PolicyError) as caught:
        getattr(policy, axis)(peeks)
    message = str(caught.value)
    assert f"{axis} policy 'peeks' takes 'output_tokens', 'arrival_time'" in message
    assert "it may take, by name: " in message
    assert all(name in message for name in policy.contracts.ARGUMENTS[axis])


def test_catching_all_arguments_is_no_contract():
    with pytest.raises(PolicyError, match="takes 'arguments'"):
        policy.rank(lambda *arguments: 0.0)


@pytest.mark.parametrize("axis", ["rank", "batching", "memory", "router"])
@pytest.mark.parametrize("thing", [3, "fcfs"])
def test_what_is_no_function(axis, thing):
    with pytest.raises(PolicyError, match=f"a {axis} policy must be a Python function; got {thing!r}"):
        getattr(policy, axis)(thing)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axis", ["rank", "victim", "batching", "memory", "router"])
def test_a_bare_function_or_another_axis(axis, engine):
    wanted = "rank" if axis == "victim" else axis
    other = policy.known("memory" if axis != "memory" else "rank")
    with pytest.raises(PolicyError, match=f"decorated with lengthwise.policy.{wanted}; got <function"):
        run(engine, **{axis: divides})
    with pytest.raises(PolicyError, match="got one of axis"):
        run(engine, **{axis: next(iter(other.values()))})
