"""A request goes where the beginning of its prompt is cached, while that saves more than the longer backlog takes."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_worlds import request, scheduler, worker

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.core.dispatch import DispatchPass, Sessions
from lengthwise.gateway.core.ranking import PREFILL_WEIGHT, Entry
from lengthwise.gateway.core.worker import MAX_KEYS, PreemptionCost, PrefixCache, Worker, mean_tokens_per_s
from lengthwise.gateway.request import NO_PREFIX, PREFIX_BLOCKS, PrefixHasher, PromptPrefix
from lengthwise.gateway.scheduling import WorkerState

PRINTS = PrefixHasher(b"a secret of tests")
SYSTEM = "You are a clerk of the archive. Answer in the words of the files. " * 80  # 5,280 letters


def begins(text, tokens, *, model="m", **metadata):
    return {"prompt_tokens": tokens, "prefix": PRINTS.of_text(text, tokens, model=model, **metadata)}


def two(**dispatch):
    return scheduler("fcfs", workers=[worker("a", cap=9), worker("b", cap=9)], dispatch=Dispatch(**dispatch))


def place(made, now_s, one):
    """Where it goes."""
    made.offer(now_s, one)
    ((_, name),) = made.schedule(now_s).assign
    return name


def warmed(made, text=SYSTEM, tokens=1000):
    """Worker b has the text in its cache, and no request runs there any more."""
    assert place(made, 0.0, request(900, predicted=5000)) == "a"
    assert place(made, 0.0, request(901, **begins(text, tokens))) == "b"
    made.remove(0.1, 900)
    made.remove(0.1, 901)


@pytest.mark.parametrize(("behind_tokens", "to"), [(20, "b"), (200, "a")])
def test_a_known_beginning_is_followed_while_it_is_worth_more_than_balance(behind_tokens, to):
    """5,120 letters of 5,289 are blocks of both: 0.5 * 0.1 * about 850 tokens save as much as 43 output tokens."""
    made = two()
    warmed(made)
    made.offer(0.2, request(1, predicted=5000))
    made.schedule(0.2)  # a is busy
    assert place(made, 0.2, request(2, predicted=5000 + behind_tokens)) == "b"
    made.remove(0.3, 1)
    made.offer(0.3, request(3, predicted=5000))
    assert made.schedule(0.3).assign == ((3, "a"),)
    requested = request(4, **begins(SYSTEM + "and who?", 1002))
    assert place(made, 0.4, requested) == to
    assert requested.dispatch.cached_tokens == (pytest.approx(0.87 * 1000, rel=0.05) if to == "b" else 0)


@pytest.mark.parametrize("change", ["affinity", "tenant", "model", "prefixes"])
def test_without_affinity_or_with_another_tenant_or_model_only_the_backlog_counts(change):
    made = two(**{"affinity": 0.0} if change == "affinity" else {})
    warmed(made)
    metadata = {"tenant": {"tenant": 1}, "model": {"model": "n"}}.get(change, {})
    requested = request(1, **begins(SYSTEM, 1000, **metadata))
    if change == "prefixes":
        requested.prefix = NO_PREFIX
    assert place(made, 0.2, requested) == "a"
    assert requested.dispatch.cached_tokens == 0
    same = request(2, **begins(SYSTEM, 1000))
    assert place(two(), 0.3, same) == "a", "no worker has it: the first of equals"


@pytest.mark.parametrize("status", ["stays", "down for a moment", "restarted", "replaced"])
def test_what_a_worker_had_is_forgotten_with_it(status):
    made = two()
    warmed(made)
    states = [worker("a", cap=9), worker("b", cap=9, epoch=int(status == "restarted"))]
    if status == "replaced":
        made.update_workers(0.2, states[:1])
    if status == "down for a moment":
        made.update_workers(0.2, [states[0], worker("b", cap=9, up=False)])
    made.update_workers(0.3, states)
    retained = status in ("stays", "down for a moment")
    assert place(made, 0.4, request(1, **begins(SYSTEM, 1000))) == ("b" if retained else "a")


def test_a_renamed_worker_keeps_its_cache():
    made = two()
    warmed(made)
    made.update_workers(0.2, [worker("a", cap=9), worker("c", cap=9, renamed_from="b")])
    assert place(made, 0.4, request(1, **begins(SYSTEM, 1000))) == "c"


workers_there = st.lists(
    st.tuples(
        st.one_of(st.none(), st.floats(1, 1e4)),  # speed
        st.floats(0, 1e5),  # backlog
        st.integers(0, 4),  # what was sent there before
        st.floats(0, 0.1),  # what a prompt token was seen to take
    ),
    min_size=2,
    max_size=6,
)
TEXTS = ["x" * 300, "x" * 5000, SYSTEM, SYSTEM + "x" * 4000, "y" * 70_000, "z"]


@settings(max_examples=100, deadline=None)
@given(workers_there, st.sampled_from(TEXTS), st.floats(0, 1), st.booleans())
def test_the_predicted_cost_is_never_above_that_of_balance_alone(active, text, affinity, has_session):
    worker_pool, tokens = [], {one: len(one) // 4 + 1 for one in TEXTS}
    sessions, entry = Sessions(), Entry(request(1, session="s" * has_session, **begins(text, tokens[text])))
    entry.update_remaining()
    for number, (speed, work, sent, prompt_s) in enumerate(active):
        one = Worker(WorkerState(f"w{number}", ("m",), concurrency=9), Dispatch(), passthrough=False)
        one.throughput.tokens_per_s, one.work = speed, work
        for step in range(40):
            one.cost.add_start(10 * step, prompt_s * 10 * step, uncached=True)
        for each in TEXTS[:sent]:
            one.prefix_cache.insert(begins(each, tokens[each])["prefix"])
        worker_pool.append(one)
    sessions.dispatched(entry, "w1")
    placing = DispatchPass(worker_pool, sessions, affinity, 0.0, {"m": 1})
    near = placing.choose(entry)
    best = DispatchPass(worker_pool, Sessions(), 0.0, 0.0, {"m": 1}).choose(entry)

    def cost_s(one):
        speed = one.throughput.tokens_per_s or mean_tokens_per_s(worker_pool) or 1.0
        cached = one.prefix_cache.cached_tokens(entry.request.prefix)
        if has_session and one.name == "w1":
            cached = entry.request.prompt_tokens
        each_s = one.cost.prompt_token_s()
        each_s = PREFILL_WEIGHT / speed if each_s is None else min(each_s, 1 / speed)
        return (one.work + entry.work) / speed - affinity * cached * each_s

    assert cost_s(near) <= cost_s(best)
    assert cost_s(near) == pytest.approx(min(cost_s(one) for one in worker_pool), abs=1e-9)
    if near is not best:
        assert cost_s(near) < cost_s(best), "balance has priority among equals"


prompts = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40_000), st.integers(0, 9)), max_size=40)


@settings(max_examples=100, deadline=None)
@given(prompts, st.integers(0, 60), st.one_of(st.none(), st.floats(0, 5000)))
def test_what_is_remembered_is_bounded_and_never_more_than_the_prompt(report, most, max_tokens):
    cached = PrefixCache(most)
    for system, letters, tail in report:
        text = f"system {system} " * 500 + str(tail) * letters
        prefix = begins(text, len(text) // 4)["prefix"]
        expected = cached.cached_tokens(prefix)
        assert cached.insert(prefix, max_tokens) == expected <= len(text) // 4
        assert len(cached) <= most
        assert (cached.tokens > 0) == (len(cached) > 0)
        assert max_tokens is None or cached.tokens <= max_tokens


def test_the_least_recently_used_is_evicted_first_and_deep_before_shared_blocks():
    cached, shared = PrefixCache(10), "s" * 256
    first, second = (PRINTS.of_text(shared + c * 256 * 5, 600, model="m") for c in "ab")
    cached.insert(first)
    cached.insert(second)  # 6 + 5 hashes: one too many
    assert cached.cached_tokens(first) == 500
    assert cached.cached_tokens(second) == 600
    cached.insert(PRINTS.of_text("c" * 256 * 7, 700, model="m"))
    assert cached.cached_tokens(first) == 100, "the shared block is in use by the second"
    assert cached.cached_tokens(second) == 300


def test_all_workers_together_remember_so_many_bytes_at_most():
    worker_pool = scheduler("fcfs", workers=[worker(f"w{n}") for n in range(7)]).worker_pool
    assert sum(one.prefix_cache.max_keys for one in worker_pool) <= MAX_KEYS
    tracemalloc.start()
    cached = PrefixCache(2_000)
    for number in range(400):
        cached.insert(PRINTS.of_text(f"{number:04}" * 1000, 1000, model="m"))
    in_use, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(cached) == 2_000
    assert in_use / len(cached) < 300, "so the whole takes below 40 MB"


def test_beginnings_are_alike_as_far_as_the_prompts_are():
    one = PRINTS.of_text("a" * 2000 + "b" * 2000, 1000, model="m")
    other = PRINTS.of_text("a" * 2000 + "c" * 2000, 1000, model="m")
    alike = sum(x == y for x, y in zip(one.keys, other.keys, strict=True))
    assert PREFIX_BLOCKS[alike - 1] == 2000 // 256
    assert one.block_tokens == 64
    assert len(set(one.keys) | set(other.keys)) == 2 * len(one.keys) - alike


def test_a_hash_reveals_nothing_without_the_secret():
    text = "a secret text " * 100
    own = PRINTS.of_text(text, 300, model="m")
    others = [
        PrefixHasher().of_text(text, 300, model="m"),
        PRINTS.of_text(text, 300, model="m2"),
        PRINTS.of_text(text, 300, model="m", tenant=1),
        PRINTS.of_ids([ord(c) for c in text], model="m"),
    ]
    assert all(not set(own.keys) & set(other.keys) for other in others)
    assert PRINTS.of_text(text, 300, model="m") == own
    assert PromptPrefix.__slots__ == ("keys", "block_tokens")


def test_token_ids_are_compared_as_they_are():
    ids = list(range(1000))
    long = PRINTS.of_ids(ids, model="m")
    assert PRINTS.of_ids([*ids[:500], 7, *ids[501:]], model="m").keys[:7] == long.keys[:7]
    assert long.block_tokens == 64
    assert len(long.keys) == sum(size <= 1000 // 64 for size in PREFIX_BLOCKS)
    assert PRINTS.of_ids([1 << 70] * 100, model="m").keys, "whatever a client sends"
    assert PRINTS.of_ids(ids[:63], model="m") == NO_PREFIX


def test_ids_with_equal_python_hashes_get_different_keys_and_each_secret_changes_them():
    ids = list(range(1, 129))
    own = PRINTS.of_ids(ids, model="m").keys
    assert len(own) == 2
    alike = [one + 2**61 - 1 for one in ids]
    assert hash(tuple(alike)) == hash(tuple(ids))
    assert not set(PRINTS.of_ids(alike, model="m").keys) & set(own)
    assert not set(PrefixHasher(b"another secret").of_ids(ids, model="m").keys) & set(own)


def test_any_text_has_prints_and_ids_of_no_engine_are_never_taken_for_others():
    halves = PRINTS.of_text("\ud83d" * 300, 300, model="m")
    assert len(halves.keys) == 1
    assert halves != PRINTS.of_text("\ude00" * 300, 300, model="m")
    huge, small = (PRINTS.of_ids([one] * 64, model="m") for one in (2**70, 0))
    assert huge.keys
    assert huge != small


def test_a_prompt_token_costs_what_starts_without_a_cache_have_shown():
    price = PreemptionCost()
    for step in range(15):
        price.add_start(100 * step, 0.02 + 0.001 * 100 * step, uncached=True)
        price.add_start(5000, 0.03)  # from the cache
    assert price.prompt_token_s() is None
    for _ in range(5):  # what was seen long ago fades
        price.add_start(2300, 0.02 + 2.3, uncached=True)
    assert price.prompt_token_s() == pytest.approx(0.001)
    alike = PreemptionCost()
    for _ in range(100):
        alike.add_start(500, 0.7, uncached=True)
    assert alike.prompt_token_s() is None, "prompts of one length do not tell what a token costs"


def test_starts_reveal_the_cost_of_a_prompt_to_a_worker_but_cached_starts_do_not():
    """20 ms a start and 2 ms a token; what is cached costs nothing."""
    made, now_s = scheduler("fcfs", workers=[worker(cap=1)]), 0.0
    for number in range(60):
        text, tokens = (
            (SYSTEM, 1000) if number % 2 else (f"{number:03}" * 100 * (1 + number % 7), 75 * (1 + number % 7))
        )
        one = request(number, now_s, **begins(text, tokens))
        made.offer(now_s, one)
        made.schedule(now_s)
        now_s += 0.02 + 0.002 * (tokens - one.dispatch.cached_tokens)
        made.on_progress(now_s, number, 1)
        now_s += 5.0
        made.remove(now_s, number)
    (only,) = made.worker_pool
    assert only.cost.prompt_token_s() == pytest.approx(0.002, rel=0.02)
    assert only.prompt_token_s(100.0) == pytest.approx(0.002, rel=0.02)
    assert only.prompt_token_s(1000.0) == 0.001, "never more than an output token"
