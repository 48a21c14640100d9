"""Where engines have slipped before: odd policies, odd inputs, both engines alike."""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from lengthwise import _jit, policy
from lengthwise.engine import simulate
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism
from lengthwise.schema.errors import InputError, PolicyError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import UNCAPPED, Workload

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))
from worlds import GPU, MODEL, NODE, cost_tables

ENGINES = pytest.mark.parametrize("engine", ["kernel", "reference"])


def deployment(replicas=1, **axes):
    scheduler = replace(policy.scheduler("vllm_v1"), **axes)
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=64)
    kv = KvPlan(200, 4, 0.0, 0.0, 0.0, 0.0)
    return Deployment(MODEL, GPU, NODE, Parallelism(1, 1, replicas), limits, scheduler, cost_tables([2]), kv, 300)


def few(n=3, **columns):
    return Workload(np.zeros(n), np.full(n, 80), np.full(n, 5), **columns)


@policy.rank
def breaks(arrival_s):
    raise Exception("boom")  # noqa: TRY002


@policy.rank
def gives_up(arrival_s):
    raise RuntimeError("tired")


@ENGINES
@pytest.mark.parametrize("rank", [breaks, gives_up])
def test_any_exception_of_a_policy_is_reported_with_its_name(rank, engine):
    with pytest.raises(PolicyError, match=f"rank policy '{rank.name}' raised"):
        simulate(few(), deployment(rank=rank), engine=engine)


@ENGINES
def test_a_limit_above_the_context_is_refused(engine):
    """The context has 300 tokens, and a prompt that fills it is rejected as before."""
    with pytest.raises(InputError, match=r"must fit in max_model_len 300.*request 2 has 80 \+ 221 tokens"):
        simulate(few(max_tokens=np.array([220, UNCAPPED, 221])), deployment(), engine=engine)
    long = Workload(np.zeros(1), np.full(1, 400), np.full(1, 5), max_tokens=np.full(1, 50))
    assert simulate(long, deployment(), engine=engine).requests.status.tolist() == [Status.REJECTED]


@policy.rank
def says_nothing(arrival_s):
    pass


@policy.rank
def says_a_word(arrival_s):
    return "soon"


@pytest.mark.parametrize(("rank", "given"), [(says_nothing, "None"), (says_a_word, "'soon'")])
def test_what_is_no_number_is_shown(rank, given):
    with pytest.raises(PolicyError, match=f"must return a number; it returned {given}"):
        simulate(few(), deployment(rank=rank))


@policy.router
def lost(waiting):
    return math.nan


@policy.batching
def nan_later(decodes, max_num_seqs):
    return max_num_seqs, (math.nan if decodes > 0 else 64.0), policy.CHUNKED


@ENGINES
@pytest.mark.parametrize("axis", [{"router": lost, "replicas": 2}, {"batching": nan_later}])
def test_nan_in_place_of_an_integer_is_an_error(axis, engine):
    with pytest.raises(PolicyError, match="NaN"):
        simulate(few(), deployment(**axis), engine=engine)


@policy.batching
def starve(max_num_seqs, token_budget, num_running):
    return max_num_seqs, (token_budget if num_running == 0 else 0), policy.CHUNKED


@ENGINES
def test_a_prompt_that_never_goes_on_is_an_error(engine):
    with pytest.raises(PolicyError, match=r"request 0 waits forever.*'starve'"):
        simulate(few(1), deployment(batching=starve), engine=engine)


@policy.router
def second_draw(draw_b, waiting):
    return int(draw_b * len(waiting))


@ENGINES
def test_a_router_may_use_the_second_draw_alone(engine):
    records = simulate(few(40), deployment(4, router=second_draw), engine=engine)
    assert set(records.requests.replica) == {0, 1, 2, 3}


def test_a_closed_loop_has_no_arrivals_of_its_own():
    with pytest.raises(InputError, match="arrival_s must be 0 throughout in a closed loop; request 1 has 5"):
        Workload([0.0, 5.0], [1, 1], [1, 1], concurrency=1)


def test_those_a_closed_loop_never_let_in_have_no_arrival():
    records = simulate(few(30, concurrency=1), deployment(), time_limit_s=0.1)
    assert np.isnan(records.requests.arrival_s[-1])
    assert records.requests.arrival_s[0] == 0


@pytest.mark.parametrize("options", [{"seed": -1}, {"max_log_steps": -1}])
def test_negative_options_are_refused(options):
    with pytest.raises(InputError, match="must not be negative"):
        simulate(few(), deployment(), **options)


@pytest.mark.parametrize(("step_s", "at"), [(0.0, 0), (1e-9, 0), (1e9, -1)])
@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_gaps_beyond_the_histogram_are_in_its_first_and_last_bin(step_s, at, engine):
    made = deployment()
    parts = ("layer_s", "comm_s", "embedding_s", "send_s", "head_s", "prefill_s", "decode_s")
    zeros = {name: np.zeros_like(getattr(made.cost, name)) for name in parts}
    cost = replace(made.cost, **zeros, host_s=np.full_like(made.cost.host_s, step_s))
    gaps = simulate(few(), replace(made, cost=cost), engine=engine).gaps
    assert gaps.total > 0
    assert gaps.histogram[at] == gaps.total


def test_a_cache_that_cannot_be_written_is_none(monkeypatch):
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", "/proc/nope")
    function = _jit.compile_now(_plus_one, _jit.i8(_jit.i8), cached=True)
    assert function(1) == 2


def _plus_one(x):
    return x + 1


def test_a_run_that_the_limit_cut_lasts_until_the_limit():
    workload = Workload([0.0, 100.0], [10, 10], [5, 5])
    records = simulate(workload, deployment(), time_limit_s=50.0)
    assert records.end_s == 50.0
    assert records.totals.busy_s[0] < 0.1


@ENGINES
def test_steps_under_way_at_the_limit_fit_into_the_run(engine):
    records = simulate(few(40), deployment(), time_limit_s=0.01, engine=engine)
    assert 0.01 <= records.end_s == records.steps.end_s[-1]
    assert records.totals.busy_s[0] <= records.end_s


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"max_num_seqs": 2.5},
        {"max_model_len": 1},
        {"watermark": -1},
        {"gpu_memory_utilization": 2},
        {"timeout_s": math.nan},
        {"timeout_s": -1.0},
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
        EngineLimits(**wrong)


@pytest.mark.parametrize("tokens", [[1.9], [math.nan]])
def test_tokens_are_integers(tokens):
    with pytest.raises(InputError, match="prompt_tokens must be whole numbers; request 0 has"):
        Workload([0.0], tokens, [1])


def _cached_plus_one():
    return _jit.compile_now(_plus_one, _jit.i8(_jit.i8), cached=True)


def _compile_and_call(x):
    return _cached_plus_one()(x)


def _damaged(content):
    """The code with one bit of its last quarter changed, which might still link."""
    at = len(content) * 3 // 4
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.skipif(_jit.DISABLED, reason="nothing is compiled")
@pytest.mark.parametrize(
    "damage", [lambda _: b"", lambda content: content[:100], lambda content: content + b"0", _damaged]
)
def test_damaged_machine_code_is_recompiled(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path))
    _cached_plus_one()
    (file,) = tmp_path.rglob("*plus_one*.code")
    intact = file.read_bytes()
    file.write_bytes(damage(intact))
    for _ in range(2):
        assert _cached_plus_one()(1) == 2
    assert len(file.read_bytes()) == len(intact), "the file was written anew"
    assert [path.name for path in tmp_path.rglob("*.*")] == [file.name], "no temporary files remain"


@pytest.mark.skipif(_jit.DISABLED, reason="nothing is compiled")
def test_machine_code_of_another_function_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path))
    _cached_plus_one()
    _jit.compile_now(_twice, _jit.i8(_jit.i8), cached=True)
    (own,), (other,) = tmp_path.rglob("*plus_one*.code"), tmp_path.rglob("*twice*.code")
    own.write_bytes(other.read_bytes())
    assert _cached_plus_one()(5) == 6


def _twice(x):
    return 2 * x


@pytest.mark.skipif(_jit.DISABLED, reason="nothing is compiled")
def test_several_threads_compile_and_call_the_same_function(tmp_path, monkeypatch):
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(_compile_and_call, range(20))) == list(range(1, 21))


@pytest.mark.skipif(_jit.DISABLED, reason="nothing is compiled")
@pytest.mark.parametrize(
    "wrong",
    [
        (np.zeros((2, 3)),),
        (np.zeros((2, 3)), 1, 2),
        (np.zeros((2, 3), np.int64), 1),
        (np.zeros(6), 1),
        (np.zeros((3, 2)).T, 1),
        (np.zeros((4, 3))[::2], 1),
        ([[0.0]], 1),
        (np.zeros((2, 3)), "one"),
        (np.zeros((2, 3)), 1.5),
    ],
    ids=str,
)
def test_a_compiled_function_refuses_other_types(wrong):
    function = _jit.compile_now(_last_of_row, _jit.f8(_jit.type_of(np.zeros((1, 1))), _jit.i8), cached=False)
    assert function(np.arange(6.0).reshape(2, 3), 1) == 5.0
    with pytest.raises(TypeError, match="compiled"):
        function(*wrong)


def _last_of_row(table, row):
    return table[row, -1]


@pytest.mark.skipif(_jit.DISABLED, reason="nothing is compiled")
def test_all_kinds_of_arguments_arrive():
    inner = _jit.f8(_jit.f8, _jit.i8)
    given = Parts(np.arange(6.0).reshape(2, 3), Pair(np.arange(3), True))
    signature = _jit.pair_of_floats(_jit.function_type(inner), _jit.type_of(given), _jit.f8, _jit.type_of(False))
    scale = _jit.compile_now(_scaled, inner, cached=False)
    function = _jit.compile_now(_combined, signature, cached=False)
    for flag in (False, True):
        assert function(scale, given, 0.5, flag) == pytest.approx(_combined(_scaled, given, 0.5, flag))
    with pytest.raises(TypeError, match="takes a compiled function"):
        function(_scaled, given, 0.5, True)


class Pair(NamedTuple):
    numbers: np.ndarray
    chosen: bool


class Parts(NamedTuple):
    table: np.ndarray
    pair: Pair


def _scaled(value, times):
    return value * times


def _combined(scale, parts, offset, flag):
    total = offset
    for row in range(parts.table.shape[0]):
        for column in range(parts.table.shape[1]):
            total += scale(parts.table[row, column], parts.pair.numbers[column])
    return total + (1000.0 if parts.pair.chosen and flag else 0.0), math.frexp(total)[0]


def test_helpers_run_and_raise_alike_when_compiled_and_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        function = _jit.compile_now(_sum_of_shares, _jit.i8(_jit.i8, _jit.i8), cached=True)
        assert function(7, 2) == 7
        with pytest.raises(ZeroDivisionError):
            function(7, 0)


def _sum_of_shares(count, parts):
    return _share(count, parts) + _double_share(count, parts) - 2


@_jit.jit
def _share(count, parts):
    return count // parts


@_jit.jit_cold
def _double_share(count, parts):
    return _share(count, parts) + _share(count, parts)
