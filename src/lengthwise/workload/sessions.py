"""Generates sessions: shared system prompts, chats of several turns, and agents that call tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import MAX_TOKENS, UNCAPPED, After, SharedPrefixes, Workload
from lengthwise.workload.arrivals import Arrivals, ClosedLoop
from lengthwise.workload.distributions import Fixed, Marginal, require, require_positive
from lengthwise.workload.lengths import Lengths, draw, limits_within
from lengthwise.workload.preset_files import Predicted, drawn_tenants, predicted_lengths

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BLOCK_TOKENS = 16  # tokens of the blocks in which system prompts are shared, as engines have them by default
_MAX_DRAWS_PER_REQUEST = 64


@dataclass(frozen=True)
class Delay:
    """A lognormal delay; ``sigma`` 0 makes it constant."""

    median_s: float
    sigma: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.median_s < np.inf, f"median_s must be a finite number from 0; it is {self.median_s}")
        require(0 <= self.sigma <= 10, f"sigma must be from 0 to 10; it is {self.sigma}")

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """Return delays [n] in seconds."""
        return np.asarray(self.median_s * np.exp(self.sigma * rng.standard_normal(n)))


@dataclass(frozen=True)
class Groups:
    """Groups of sessions with a common system prompt. The share of the k-th group is proportional to ``k**-zipf``."""

    count: int
    system_prompt: Marginal  # one length is drawn for each group
    zipf: float = 1.0

    def __post_init__(self) -> None:
        require(self.count >= 1, f"the number of groups must be at least 1; it is {self.count}")
        require(0 <= self.zipf <= 10, f"zipf must be from 0 to 10; it is {self.zipf}")

    @property
    def shares(self) -> Floats:
        """Return each group's expected share of the sessions, [count]."""
        weights = np.exp(-self.zipf * np.log(np.arange(1, self.count + 1)))
        return np.asarray(weights / weights.sum())

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return the group of each session [n], and the tokens of each group's system prompt [count]."""
        levels = np.maximum(rng.random(self.count), 2.0**-54)
        tokens = np.maximum(np.rint(self.system_prompt.quantile(levels)), 1).astype(np.int64)
        below = np.cumsum(self.shares)
        return np.minimum(np.searchsorted(below, rng.random(n), side="right"), self.count - 1), tokens


@dataclass(frozen=True)
class Tools:
    """Calls of tools after a turn. A call appends its result to the context, and the model is called again.

    With probability ``fan_out_share``, ``fan_out`` parallel requests replace the tool. Each continues the context with
    a prompt of its own. The request after them waits for all of them and appends their outputs to the context.
    """

    calls: float  # mean number of calls after a turn; geometric, from 0
    time: Delay = field(default=Delay(1.0))  # from the end of a request until the result is sent
    tokens: Marginal = field(default=Fixed(200))  # of a result
    max_calls: int | None = None
    fan_out: int = 1
    fan_out_share: float = 0.0

    def __post_init__(self) -> None:
        require_positive("calls", self.calls)
        require(self.max_calls is None or self.max_calls >= 1, f"max_calls must be at least 1; it is {self.max_calls}")
        require(1 <= self.fan_out <= 1000, f"fan_out must be from 1 to 1000; it is {self.fan_out}")
        require(0 <= self.fan_out_share <= 1, f"fan_out_share must be from 0 to 1; it is {self.fan_out_share}")


@dataclass(frozen=True)
class Sessions:
    """Sessions of geometrically many turns. A turn's prompt is the context so far and new tokens.

    The context so far is the previous request's prompt and output; in the first turn, it is the group's system prompt.
    A session ends before the request whose prompt and output would exceed ``max_context_tokens``; a session whose first
    request would exceed it is left out.
    """

    turns: float = 1.0  # mean
    think_time: Delay = field(default=Delay(0.0))  # from the end of an answer to the next turn
    max_turns: int | None = None
    max_context_tokens: int | None = None
    groups: Groups | None = None
    tools: Tools | None = None
    block_tokens: int = BLOCK_TOKENS  # a divisor or a multiple of the engine's block size

    def __post_init__(self) -> None:
        require(1 <= self.turns < np.inf, f"turns must be a finite number from 1; it is {self.turns}")
        require(self.max_turns is None or self.max_turns >= 1, f"max_turns must be at least 1; it is {self.max_turns}")
        limit = self.max_context_tokens
        require(limit is None or limit >= 2, f"max_context_tokens must be at least 2; it is {limit}")
        require(self.block_tokens >= 1, f"block_tokens must be at least 1; it is {self.block_tokens}")

    @property
    def has_turns(self) -> bool:
        """Return whether sessions may have several requests."""
        return self.tools is not None or (self.turns > 1 and self.max_turns != 1)


def generate_sessions(
    num_requests: int,
    sessions: Sessions,
    lengths: Lengths,
    arrivals: Arrivals,
    seed: int = 0,
    *,
    predicted: Predicted = "none",
    tenants: int | Sequence[float] | None = None,
    name: str = "",
) -> Workload:
    """Return ``num_requests`` requests of sessions that start at the times of ``arrivals``; equal seeds, equal bytes.

    ``lengths`` gives the new prompt tokens of turns and parallel requests, and all outputs. The last session may be
    incomplete. ``extra`` has "session", "turn" (from 0; parallel requests have the turn of the request that joins them)
    and, with groups, "group". A request that waits for others has the arrival of its session. A client's limit of an
    output is at most the space that ``max_context_tokens`` leaves. ``predicted`` and ``tenants`` are those of
    ``generate``. Raises InputError for an invalid argument, or if almost no session fits in the context.
    """
    if num_requests < 1:
        raise InputError(f"num_requests must be at least 1; it is {num_requests}")
    tools = sessions.tools
    per_session = sessions.turns * (1 + (tools.calls * (1 + tools.fan_out_share * tools.fan_out) if tools else 0))
    count = int(num_requests / per_session) + 10
    while True:
        steps = _SessionRequests.draw(count, sessions, lengths, seed)
        if steps.requests >= num_requests:
            break
        if count > _MAX_DRAWS_PER_REQUEST * num_requests:
            raise InputError(
                f"of {count:,} sessions only {steps.requests:,} requests fit in {sessions.max_context_tokens} tokens; "
                "raise max_context_tokens, or make system prompts, prompts and outputs shorter"
            )
        count *= 2
    made = _workload(steps, num_requests, sessions)
    if isinstance(arrivals, ClosedLoop) and made.after is not None:
        raise InputError("sessions of several requests need arrivals at which they start; a closed loop has none")
    cap, total = made.max_tokens, sessions.max_context_tokens
    if cap is not None and total is not None:
        cap = limits_within(total, made.prompt_tokens, made.output_tokens, cap)
    session = made.extra["session"]
    for_arrivals, for_tenants = _streams(seed)[-2:]
    started = int(session[-1]) + 1
    tenant = None if tenants is None else drawn_tenants(tenants, started, for_tenants)[session]
    return replace(
        made,
        arrival_s=arrivals.sample(started, for_arrivals)[session],
        predicted_tokens=predicted_lengths(predicted, made.output_tokens),
        tenant=tenant,
        max_tokens=cap,
        concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
        name=name,
    )


def find_sessions(workload: Workload) -> Workload:
    """Return the workload with the columns "session" and "turn" of ``extra``, found by its shared prefixes.

    An earlier request can be continued if no other request continues it, and if the last full block of its prompt was
    new then (otherwise later prompts may only share a system prompt). Of those with whose full blocks its own prompt
    begins, a request continues the longest, if its prompt is longer than the prompt and output of that one together.
    Otherwise it starts a session. The workload does not change if it has the column "session" or no prefixes.
    """
    prefixes = workload.prefixes
    if prefixes is None or "session" in workload.extra:
        return workload
    known: set[int] = set()
    last: dict[int, int] = {}  # by last full block: the request that a longer prompt may continue
    full = np.minimum(workload.prompt_tokens // prefixes.block_tokens, np.diff(prefixes.start))
    total = workload.prompt_tokens + workload.output_tokens
    session, turn = np.arange(len(workload)), np.zeros(len(workload), np.int64)
    for i, (start, blocks) in enumerate(zip(prefixes.start, full, strict=False)):
        ids = prefixes.block_ids[start : start + blocks].tolist()
        shared = next((one for one in reversed(ids) if one in last), -1)
        before = last.get(shared, -1)
        if before >= 0 and workload.prompt_tokens[i] > total[before]:
            session[i], turn[i] = session[before], turn[before] + 1
            del last[shared]
        else:
            before = -1
        if ids and (before >= 0 or ids[-1] not in known):
            last[ids[-1]] = i
        known.update(ids)
    return replace(workload, extra={**workload.extra, "session": session, "turn": turn})


def _streams(seed: int) -> list[np.random.Generator]:
    if seed < 0:
        raise InputError(f"seed must not be negative; it is {seed}")
    return [np.random.default_rng(one) for one in np.random.SeedSequence(seed).spawn(11)]


@dataclass(frozen=True)
class _SessionRequests:
    """The requests of sessions, one row for each but the parallel ones, which are in columns [steps, fan_out]."""

    session: Ints  # [steps], from 0 and not decreasing
    turn: Ints
    prompt: Ints
    answer: Ints  # [steps, 3]: output tokens, max_tokens (or UNCAPPED) and ignore_eos
    delay_s: Floats
    joins: npt.NDArray[np.bool_]  # whether the request joins parallel requests
    parallel_prompt: Ints  # [steps, fan_out]; counts only where ``joins``
    parallel_answer: Ints  # [steps, fan_out, 3]
    group: Ints  # [sessions drawn]
    system_tokens: Ints  # [groups]

    @property
    def requests(self) -> int:
        """Return the number of requests, parallel ones included."""
        parallel: int = self.parallel_prompt.shape[1]
        return len(self.session) + int(self.joins.sum()) * parallel

    @classmethod
    def draw(cls, count: int, sessions: Sessions, lengths: Lengths, seed: int) -> _SessionRequests:
        """Draw ``count`` sessions and end them at the limit of the context. A larger ``count`` only adds sessions."""
        for_turns, for_calls, for_groups, *others = _streams(seed)
        for_lengths, for_think, for_tool, for_result, for_fork, for_parallel, *_ = others
        tools = sessions.tools
        turns = for_turns.geometric(1 / sessions.turns, count)
        turns = np.minimum(turns, sessions.max_turns or turns)
        calls = np.zeros(int(turns.sum()), np.int64)
        if tools is not None:
            calls = for_calls.geometric(1 / (1 + tools.calls), len(calls)) - 1
            calls = np.minimum(calls, tools.max_calls or calls)
        is_turn = np.zeros(int(len(calls) + calls.sum()), bool)
        is_turn[np.cumsum(1 + calls) - 1 - calls] = True
        ends = np.cumsum(np.add.reduceat(1 + calls, np.cumsum(turns) - turns))
        length = np.diff(ends, prepend=0)
        session, first = np.repeat(np.arange(count), length), ends - length
        n = len(session)
        turn = np.arange(n) - first[session]

        new, answer = _answers(lengths, n, for_lengths)
        output = answer[:, 0]
        delay_s = sessions.think_time.sample(n, for_think)
        fan_out = tools.fan_out if tools else 0
        joins = np.zeros(n, bool)
        parallel_new, parallel_answer = np.zeros((n, fan_out), np.int64), np.zeros((n, fan_out, 3), np.int64)
        if tools is not None:
            levels = np.maximum(for_result.random(n), 2.0**-54)
            new = np.where(is_turn, new, np.maximum(np.rint(tools.tokens.quantile(levels)), 1)).astype(np.int64)
            delay_s = np.where(is_turn, delay_s, tools.time.sample(n, for_tool))
            joins = ~is_turn & (for_fork.random(n) < tools.fan_out_share)
            if tools.fan_out_share:
                drawn = _answers(lengths, n * fan_out, for_parallel)
                parallel_new, parallel_answer = drawn[0].reshape(n, fan_out), drawn[1].reshape(n, fan_out, 3)
                new = np.where(joins, parallel_answer[:, :, 0].sum(axis=1), new)
        delay_s[first] = 0.0

        # A prompt has the new tokens of its session up to the request, and the outputs before the request.
        grown = np.cumsum(new) + np.cumsum(output) - output
        prompt = grown - (grown - new)[first][session]
        group, system = np.zeros(count, np.int64), np.zeros(0, np.int64)
        if sessions.groups is not None:
            group, system = sessions.groups.sample(count, for_groups)
            prompt += system[group][session]
        before = np.zeros(n, np.int64)
        before[1:] = (prompt + output)[:-1]
        parallel_prompt = before[:, None] + parallel_new
        longest = prompt + output
        if fan_out:
            parallel = (parallel_prompt + parallel_answer[:, :, 0]).max(axis=1)
            longest = np.where(joins, np.maximum(longest, parallel), longest)
        exceeds = longest > (sessions.max_context_tokens or MAX_TOKENS)
        exceeded = np.cumsum(exceeds)
        # A request fits if neither it nor an earlier request of its session exceeds the limit.
        fits = exceeded == (exceeded - exceeds)[first][session]
        columns: dict[str, Any] = {
            "session": session, "turn": turn, "prompt": prompt, "answer": answer, "delay_s": delay_s, "joins": joins,
            "parallel_prompt": parallel_prompt, "parallel_answer": parallel_answer,
        }  # fmt: skip
        return cls(**{name: column[fits] for name, column in columns.items()}, group=group, system_tokens=system)


def _answers(lengths: Lengths, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Return prompt tokens [n], and for each output its tokens, max_tokens (or UNCAPPED) and ignore_eos [n, 3]."""
    drawn = draw(lengths, n, rng)
    answer = np.stack([drawn.output, np.full(n, UNCAPPED), np.zeros(n, np.int64)], axis=1)
    for column, limits in enumerate((drawn.max_tokens, drawn.ignore_eos), 1):
        if limits is not None:
            answer[:, column] = limits
    return drawn.prompt, answer


def _workload(steps: _SessionRequests, n: int, sessions: Sessions) -> Workload:
    """Return the first ``n`` requests of the sessions, all with arrival 0."""
    block_tokens = sessions.block_tokens
    fan_out = steps.parallel_prompt.shape[1]
    size = 1 + fan_out * steps.joins
    place = np.cumsum(size) - 1  # parallel requests come before the request that joins them
    step = np.repeat(np.arange(len(size)), size)
    is_parallel = np.ones(len(step), bool)
    is_parallel[place] = False
    prompt, answer = steps.prompt[step], steps.answer[step]
    prompt[is_parallel] = steps.parallel_prompt[steps.joins].ravel()
    answer[is_parallel] = steps.parallel_answer[steps.joins].reshape(-1, 3)
    output, cap, ignore_eos = answer[:n].T
    is_first = steps.turn[step] == 0
    previous = np.where(is_first, -1, place[step - 1])

    # A request waits for the one that it continues and, if it joins parallel ones, for those.
    parents = np.where(is_first, 0, 1)
    joined = place[steps.joins]
    parents[joined] += fan_out
    start, parent = np.concatenate([[0], np.cumsum(parents)]), np.repeat(previous, parents)
    offsets = np.arange(fan_out)
    parent[start[joined][:, None] + 1 + offsets] = joined[:, None] - fan_out + offsets
    start, parent = start[: n + 1], parent[: start[n]]

    session = np.unique(steps.session, return_inverse=True)[1][step][:n]
    extra = {"session": session, "turn": steps.turn[step][:n]}
    blocks = steps.system_tokens // block_tokens
    if len(blocks):
        group = extra["group"] = steps.group[steps.session][step][:n]
        counts = np.where(is_first[:n], blocks[group], 0)
        ids_start = np.concatenate([[0], np.cumsum(counts)])
        first_id = (np.cumsum(blocks) - blocks)[group] - ids_start[:-1]
        ids = np.repeat(first_id, counts) + np.arange(ids_start[-1])
    else:
        ids_start, ids = np.zeros(n + 1, np.int64), np.zeros(0, np.int64)
    delay_s = np.where(is_parallel, 0.0, steps.delay_s[step])[:n]
    has_prefixes = sessions.has_turns or sessions.groups is not None
    return Workload(
        arrival_s=np.zeros(n),
        prompt_tokens=prompt[:n],
        output_tokens=output,
        max_tokens=cap if (cap < UNCAPPED).any() else None,
        ignore_eos=ignore_eos.astype(bool) if ignore_eos.any() else None,
        extra=extra,
        # Depends on the settings: a draw may have no later turn by chance.
        after=After(start, parent, delay_s) if sessions.has_turns else None,
        prefixes=SharedPrefixes(block_tokens, ids_start, ids, previous[:n]) if has_prefixes else None,
    )
