"""Phases at one worker: a prefill of new requests, then N_D decode iterations of all requests (ExeGPT's RRA).

A phase begins with a prefill, which takes requests in the order of the queue until its batch is full, or until one of
them has streamed a token or left. In an iteration every request generates one token. The phase may end once each new
request has streamed the token of its prefill, and every request has N_D iterations since the start of the prefill. The
next phase begins with the next dispatch. Until a phase may end, only requests that have waited ``max_wait_s`` are
dispatched after its prefill.

The iterations between dispatch and first token count as well: at its first token a new request gets as many iterations
as the other requests have. If the worker was empty, it gets as many as earlier new requests needed. A token that
arrives more than half an iteration after the start of the last iteration belongs to the next iteration.

No request delays the end of a phase for ever. The phase may end as soon as its fastest stream has N_D + 2 iterations,
plus twice the tokens of the largest chunk. The phase does not wait for a request that has streamed no token in a
complete phase, until that request streams one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lengthwise.gateway.config import Phases
from lengthwise.gateway.core.ranking import Entry
from lengthwise.gateway.scheduling import Phase
from lengthwise.policy.contracts import BATCHING_ARGUMENTS
from lengthwise.policy.families import rra

PhaseReport = Callable[[Phase], None]  # takes a phase that has ended
STEPS, IDLE, STALLED = "steps", "idle", "stalled"
_PREFILL_STEPS = 2  # assumed iterations from dispatch to first token: the one that runs, and the prefill
_SMOOTHING = 0.25  # weight of the newest value in moving averages


class PrefillBatchSize:
    """The number of requests that one prefill takes, by the simulator's policy ``rra``.

    The number is B_E, or with a threshold it varies so that all phases have about equal work (ExeGPT, section 5.2).
    """

    def __init__(self, phases: Phases) -> None:
        prompts = max(1, round(phases.prefill_batch * (phases.mean_prompt_tokens or 0)))
        means = {"prompt_tokens": prompts, "decode_batch": max(1, round(phases.decode_batch or 0))}
        self._policy = policy = rra(phases.prefill_batch, phases.decode_steps, 1, phases.threshold, **means)
        parameters = {f"parameter_{n}": value for n, value in enumerate(policy.all_parameters)}
        self._constants = {**dict.fromkeys(BATCHING_ARGUMENTS, 0), "stages": 1, **parameters}
        self._one_by_one = policy.uses("step_prompts")

    def admits(self, taken: int, taken_tokens: int, next_tokens: int, *, waiting: int, decodes: int) -> bool:
        """Return whether a prefill of ``taken`` requests takes one more, which has ``next_tokens`` prompt tokens.

        The requests of the prefill have ``taken_tokens`` prompt tokens. ``waiting`` requests are in the queue, and
        ``decodes`` requests were at the worker before the prefill.
        """
        state = {"decodes": decodes, "num_running": decodes, "num_waiting": waiting + (not self._one_by_one) * taken}
        prompts = {"step_prompts": taken, "step_tokens": taken_tokens, "next_tokens": next_tokens}
        arguments = self._constants | state | prompts
        return bool(self._policy.function(**{name: arguments[name] for name in self._policy.arguments})[0] > taken)


class PhaseTracker:
    """Follows the phase of a worker by the tokens of its requests. The module's docstring states the rules."""

    def __init__(self, worker_name: Callable[[], str], phases: Phases, report: PhaseReport) -> None:
        self._worker_name, self._report = worker_name, report
        self.phases, self._batch_size = phases, PrefillBatchSize(phases)
        self._next_phases: Phases | None = None
        self._decode_steps = phases.decode_steps  # of the current phase
        self._prefill_steps = _PREFILL_STEPS
        self._mean_ended = 0.0
        self._step_s = math.nan
        self.clear()

    def configure(self, phases: Phases) -> None:
        """Apply other settings of phases from the next phase on."""
        self._next_phases = phases
        if self._current is None or self._may_end:
            self._apply_next_phases()

    def clear(self) -> None:
        """Remove all requests, and discard the current phase without a report."""
        self._current: Phase | None = None
        self._decodes = 0  # requests at the worker before the prefill
        self._num_ended = 0  # requests of the last phase that ended before the decode batch was known
        self._in_prefill = self._may_end = self._decode_batch_known = False
        self._new: set[int] = set()  # requests of this prefill without a token
        self._silent: set[int] = set()  # requests without a token in the last phase; the phase does not wait for them
        self._previous: set[int] = set()  # requests of the last phase that still run
        self._steps: dict[int, int] = {}
        self._last_token_s: dict[int, float] = {}
        self._max_steps = 0
        self._step_started_s = self._last_s = math.nan
        self._max_chunk = self._next_max_chunk = 1
        self._apply_next_phases()

    def admits(self, entry: Entry, waiting: int) -> bool:
        """Return whether the request may be dispatched now, while ``waiting`` requests are in the queue."""
        current, tokens = self._current, entry.request.prompt_tokens
        if current is None or self._may_end:
            return self._batch_size.admits(0, 0, tokens, waiting=waiting, decodes=self._expected_decodes)
        return self._in_prefill and self._batch_size.admits(
            current.prefill_batch, current.prompt_tokens, tokens, waiting=waiting, decodes=self._decodes
        )

    def dispatched(self, entry: Entry) -> None:
        """Count a dispatched request, which starts a phase, joins the prefill of the current one, or is overdue."""
        q, current = entry.request, self._current
        if current is None or self._may_end:
            current = self._start_phase(q.dispatch.dispatched_s)
        self._new.add(q.id)
        if self._in_prefill:
            current.prefill_batch += 1
            current.prompt_tokens += q.prompt_tokens
        else:
            current.overdue += 1

    def on_progress(self, now_s: float, request_id: int, tokens: int) -> bool:
        """Count new tokens of a request. Return True if the phase may end now, and could not before these tokens."""
        could_end, streams, is_new = self._may_end, request_id in self._steps, request_id in self._new
        if streams:
            self._next_max_chunk = max(self._next_max_chunk, tokens)
            steps = self._steps[request_id] + tokens
        else:  # the request's first tokens in this phase
            self._silent.discard(request_id)
            if is_new:
                self._new.discard(request_id)
                self._in_prefill = False
            if self._previous or self._max_steps:
                steps = self._max_steps + (now_s - self._step_started_s > self._step_s / 2)
            else:
                steps = self._prefill_steps + tokens - 1
        self._steps[request_id], self._last_token_s[request_id] = steps, now_s
        if steps > self._max_steps:
            if streams:
                self._update_step_s((now_s - self._step_started_s) / (steps - self._max_steps))
                # All tokens of the earlier iterations have arrived, and the requests that ended with them have left.
                if self._current is not None and not (self._decode_batch_known or self._new):
                    self._decode_batch_known, self._current.decode_batch = True, self._num_present
                    self._mean_ended += _SMOOTHING * (self._num_ended - self._mean_ended)
            self._max_steps, self._step_started_s = steps, now_s
        if is_new and not self._new and self._previous:
            self._prefill_steps = max(1, min(self._max_steps, self._decode_steps))
        self._last_s = now_s
        self._update_may_end()
        return self._may_end and not could_end

    def remove(self, request_id: int) -> None:
        """Remove a request that has left the worker. The phase ends if no request is left."""
        if request_id in self._new:
            self._in_prefill = False
        if not self._decode_batch_known:
            self._num_ended += request_id in self._previous
        for ids in (self._new, self._silent, self._previous):
            ids.discard(request_id)
        self._steps.pop(request_id, None)
        self._last_token_s.pop(request_id, None)
        if not self._num_present and self._current is not None:
            self._report_phase(IDLE, self._last_s)
            self.clear()
        self._update_may_end()

    @property
    def _num_present(self) -> int:
        return len(self._new) + len(self._silent) + len(self._steps)

    @property
    def _expected_decodes(self) -> int:
        """Expected requests at the next prefill, by the mean number of requests that ended before recent prefills."""
        return max(0, self._num_present - round(self._mean_ended))

    @property
    def _is_complete(self) -> bool:
        return not self._new and self._min_steps >= self._decode_steps

    @property
    def _min_steps(self) -> int:
        return min(self._steps.values(), default=self._max_steps)

    def _update_may_end(self) -> None:
        if self._max_steps < self._decode_steps:
            self._may_end |= not (self._new or self._steps)  # only silent requests are left
        else:
            slack = 2 + 2 * max(self._max_chunk, self._next_max_chunk)
            self._may_end |= self._is_complete or self._max_steps >= self._decode_steps + slack
        if self._may_end:
            self._apply_next_phases()

    def _apply_next_phases(self) -> None:
        if self._next_phases is not None:
            self.phases, self._batch_size = self._next_phases, PrefillBatchSize(self._next_phases)
            self._next_phases = None

    def _update_step_s(self, measured_s: float) -> None:
        """Smooth the seconds per iteration. Clip large values: an iteration with a prefill takes much longer."""
        if math.isnan(self._step_s):
            self._step_s = measured_s
        elif not math.isnan(measured_s):
            self._step_s += _SMOOTHING * (min(measured_s, 1.5 * self._step_s) - self._step_s)

    def _start_phase(self, now_s: float) -> Phase:
        if self._current is not None:
            self._report_phase(STEPS if self._is_complete else STALLED, now_s)
        current = self._current = Phase(self._worker_name(), "", now_s)
        self._decodes, self._decode_steps = self._expected_decodes, self.phases.decode_steps
        self._num_ended, self._decode_batch_known = 0, False
        last_token_s, self._last_token_s = self._last_token_s, {}
        self._silent |= self._new | (self._steps.keys() - last_token_s.keys())
        self._previous = set(last_token_s)
        self._steps = {one: -int(now_s - at_s > self._step_s / 2) for one, at_s in last_token_s.items()}
        self._new, self._max_steps = set(), 0
        self._max_chunk, self._next_max_chunk = self._next_max_chunk, 1
        self._in_prefill, self._may_end = True, False
        return current

    def _report_phase(self, cause: str, now_s: float) -> None:
        current = self._current
        assert current is not None
        current.worker, current.cause, current.finished_s = self._worker_name(), cause, max(current.started_s, now_s)
        current.decode_batch = current.decode_batch or self._num_present
        current.decode_steps = self._min_steps if cause == STEPS else self._max_steps
        current.remaining_batch = self._num_present
        self._report(current)
