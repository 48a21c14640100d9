"""Phases at one worker: new requests are encoded, then all are decoded for N_D iterations (ExeGPT's RRA).

When a phase is over and somebody waits the next one begins with an encoding, which takes requests in the order of
the queue until its batch is full (``core.adjust``) or the first of them has brought a token. Then nobody is sent
until this phase is over, too: until each new request has brought the token that its encoding makes, and everybody
has brought N_D tokens since the encoding began. So an iteration is one more token of everybody.

- An engine takes up what it is sent some iterations late. These count, so that from one encoding to the next it has
  N_D iterations, of which one may be shared with the encoding. A new request is level with the others when it
  speaks; where nobody was there before, it has as many iterations as passed last until new ones had spoken.
- Tokens of one iteration come one after the other, in any order: one that comes more than half an iteration after the
  last began is of the next.
- A piece of several tokens is as many iterations of its stream. Who ends is not waited for.
- Nobody holds a phase for ever. Once the fastest stream is past N_D by ``slack`` iterations (two, and two of its
  pieces) the phase is over whoever stalls; who brought nothing in a whole phase (evicted, or not streamed) is not
  waited for until it speaks again. A worker where nobody is left is at the end of its phase. Who has waited
  ``max_wait_s`` is sent in the midst of one. So every hold ends with a token or an end of a request that runs, and
  the relay ends those that do not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lengthwise.gateway.config import Phases
from lengthwise.gateway.core.ranking import Entry
from lengthwise.gateway.scheduling import Phase
from lengthwise.policy.contracts import BATCHING_ARGUMENTS, Policy
from lengthwise.policy.named_schedulers import resolve

_EMPTY = dict.fromkeys(BATCHING_ARGUMENTS, 0)


class Sizing:
    """The batch of an encoding: B_E, or with a threshold what keeps work even (ExeGPT, section 5.2).

    The same policy decides in the simulator (``rra`` of the axis "batching"), here with one engine as one stage.
    """

    def __init__(self, phases: Phases) -> None:
        self._policy = batching(phases)
        values = self._policy.all_parameters
        self._fixed = {**_EMPTY, "stages": 1, **{f"parameter_{n}": value for n, value in enumerate(values)}}
        self._one_by_one = self._policy.uses("step_prompts")

    def takes(self, taken: int, taken_tokens: int, next_tokens: int, *, waiting: int, decodes: int) -> bool:
        """Whether the encoding takes one more.

        Args:
            taken: Requests that it has.
            taken_tokens: Prompt tokens of these.
            next_tokens: Prompt tokens of the one that would be next.
            waiting: Requests that wait, that one among them.
            decodes: Requests that were there before the encoding.
        """
        metadata = self._fixed | {
            "decodes": decodes,
            "num_running": decodes,
            "waiting": waiting if self._one_by_one else waiting + taken,
            "step_prompts": taken,
            "step_tokens": taken_tokens,
            "next_tokens": next_tokens,
        }
        most = self._policy.function(**{name: metadata[name] for name in self._policy.arguments})[0]
        return bool(most > taken)


def batching(phases: Phases) -> Policy:
    """The simulator's policy that batches as the schedule says."""
    text = f"rra(encode_batch={phases.encode_batch}, decode_steps={phases.decode_steps}, micro_batches=1"
    if phases.threshold is not None:
        assert phases.mean_prompt_tokens is not None
        assert phases.decode_batch is not None
        prompts = max(1, round(phases.encode_batch * phases.mean_prompt_tokens))
        decodes = max(1, round(phases.decode_batch))
        text += f", threshold={phases.threshold!r}, prompt_tokens={prompts}, decode_batch={decodes}"
    return resolve("batching", f"{text})")


LATE = 2
"""Iterations until an engine has encoded what it was sent, before any were seen: one under way, and its own."""
STEPS, IDLE, STALLED = "steps", "idle", "stalled"
_SOFT = 0.25
"""Weight of the newest of what is averaged."""


@dataclass(slots=True)
class _Begun:
    """A phase under way: when it began, what stayed then, its N_D, what was sent, how many of the former ended."""

    at_s: float
    decodes: int
    decode_steps: int
    encode_batch: int = 0
    prompt_tokens: int = 0
    decode_batch: int = 0
    finished: int = 0
    overdue: int = 0
    stable: bool = False


class Phasing:
    """The phase that a worker is in; see the module.

    Args:
        worker: Tells its name.
        phases: The schedule.
        told: Called with every phase that is over.
    """

    def __init__(self, worker: Callable[[], str], phases: Phases, report: Callable[[Phase], None]) -> None:
        self._worker, self._report = worker, report
        self.phases, self._sizing = phases, Sizing(phases)
        self._tracker: Phases | None = None
        self._late, self._ending = LATE, 0.0
        self._pace_s = math.nan
        self.lost()

    def configure(self, phases: Phases) -> None:
        """Another schedule, from the next phase on: the one under way keeps its own."""
        self._tracker = phases
        if self.over:
            self._follow()

    def lost(self) -> None:
        """Nobody is there any more, and nothing is known of this phase's end."""
        self._started: _Begun | None = None
        self._encoding = self._over = False
        self._new: set[int] = set()
        self._silent: set[int] = set()
        self._before: set[int] = set()
        self._steps: dict[int, int] = {}
        self._heard_s: dict[int, float] = {}
        self._min_decode_s = 0
        self._raised_s = self._last_s = math.nan
        self._piece = self._next_piece = 1
        self._follow()

    # -- questions -------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the next phase may begin."""
        return self._started is None or self._over

    def takes(self, entry: Entry, waiting: int) -> bool:
        """Whether the request may be sent now, where so many wait with it."""
        begun, tokens = self._started, entry.request.prompt_tokens
        if begun is None or self._over:
            return self._sizing.takes(0, 0, tokens, waiting=waiting, decodes=self._stay)
        return self._encoding and self._sizing.takes(
            begun.encode_batch, begun.prompt_tokens, tokens, waiting=waiting, decodes=begun.decodes
        )

    # -- what happens ----------------------------------------------------------------------

    def sent(self, entry: Entry) -> None:
        """The request is sent: the first of a phase, one more of its encoding, or one that has waited too long."""
        q = entry.request
        begun = self._started
        if begun is None or self._over:
            begun = self._begin(q.dispatched_s)
        self._new.add(q.id)
        if self._encoding:
            begun.encode_batch += 1
            begun.prompt_tokens += q.prompt_tokens
        else:
            begun.overdue += 1

    def progressed(self, now_s: float, request_id: int, tokens: int) -> bool:
        """So many more tokens came of one that is there; whether that ends the phase."""
        was_over, spoke, is_new = self._over, request_id in self._steps, request_id in self._new
        if spoke:
            self._next_piece = max(self._next_piece, tokens)
            steps = self._steps[request_id] + tokens
        else:
            steps = self._speaks(now_s, request_id, tokens)
        self._steps[request_id], self._heard_s[request_id] = steps, now_s
        if steps > self._min_decode_s:
            self._raise(now_s, steps, spoke=spoke)
        if is_new and not self._new and self._before:
            self._late = max(1, min(self._min_decode_s, self._deadline))
        self._last_s = now_s
        self._poll()
        return self._over and not was_over

    def left(self, request_id: int) -> None:
        """It is there no more."""
        if request_id in self._new:
            self._encoding = False
        if self._started is not None and not self._started.stable:
            self._started.finished += request_id in self._before
        for those in (self._new, self._silent, self._before):
            those.discard(request_id)
        for told in (self._steps, self._heard_s):
            told.pop(request_id, None)
        if not self._present and self._started is not None:
            self._end(IDLE, self._last_s)
            self.lost()
        self._poll()

    # -- within ----------------------------------------------------------------------------

    @property
    def _present(self) -> int:
        return len(self._new) + len(self._silent) + len(self._steps)

    @property
    def _stay(self) -> int:
        """How many are there once the engine has taken up new ones, if as many end until then as did of late."""
        return max(0, self._present - round(self._ending))

    @property
    def _deadline(self) -> int:
        """N_D of the phase under way."""
        return self.phases.decode_steps if self._started is None else self._started.decode_steps

    @property
    def _complete(self) -> bool:
        """Whether all have spoken and brought N_D tokens."""
        return not self._new and self._least >= self._deadline

    @property
    def _least(self) -> int:
        """Iterations of the slowest."""
        return min(self._steps.values(), default=self._min_decode_s)

    def _poll(self) -> None:
        """Notes where the phase is over; until the next one begins it stays so."""
        self._over = self._over or self._is_over()
        if self._over:
            self._follow()

    def _is_over(self) -> bool:
        if self._min_decode_s < self._deadline:
            return not (self._new or self._steps)  # nobody is there who would tell
        slack = 2 + 2 * max(self._piece, self._next_piece)
        return self._complete or self._min_decode_s >= self._deadline + slack

    def _follow(self) -> None:
        """The schedule that was told holds from here on."""
        if self._tracker is not None:
            self.phases, self._sizing = self._tracker, Sizing(self._tracker)
            self._tracker = None

    def _is_next(self, now_s: float, since_s: float) -> bool:
        """Whether a token of now is of a later iteration than one of then."""
        return now_s - since_s > self._pace_s / 2

    def _speaks(self, now_s: float, request_id: int, tokens: int) -> int:
        """The iterations of one that brings its first tokens of this phase: it is level with the others."""
        self._silent.discard(request_id)
        if request_id in self._new:
            self._new.discard(request_id)
            self._encoding = False
        if not (self._before or self._min_decode_s):
            return self._late + tokens - 1
        return self._min_decode_s + self._is_next(now_s, self._raised_s)

    def _raise(self, now_s: float, steps: int, *, spoke: bool) -> None:
        """The first token of an iteration: those before are all in, with what ended by them."""
        if spoke:
            pace_s = (now_s - self._raised_s) / (steps - self._min_decode_s)
            self._pace_s = _paced(self._pace_s, pace_s)
            begun = self._started
            if begun is not None and not begun.stable and not self._new:
                begun.stable, begun.decode_batch = True, self._present
                self._ending += _SOFT * (begun.finished - self._ending)
        self._min_decode_s, self._raised_s = steps, now_s

    def _begin(self, now_s: float) -> _Begun:
        if self._started is not None:
            self._end(STEPS if self._complete else STALLED, now_s)
        begun = self._started = _Begun(now_s, self._stay, self.phases.decode_steps)
        heard, self._heard_s = self._heard_s, {}
        self._silent |= self._new | (self._steps.keys() - heard.keys())
        self._before = set(heard)
        self._steps = {one: -int(self._is_next(now_s, at_s)) for one, at_s in heard.items()}
        self._new, self._min_decode_s = set(), 0
        self._piece, self._next_piece = self._next_piece, 1
        self._encoding, self._over = True, False
        return begun

    def _end(self, cause: str, now_s: float) -> None:
        begun = self._started
        assert begun is not None
        self._report(
            Phase(
                self._worker(),
                cause,
                begun.at_s,
                max(begun.at_s, now_s),
                encode_batch=begun.encode_batch,
                prompt_tokens=begun.prompt_tokens,
                decode_batch=begun.decode_batch or self._present,
                decode_steps=self._least if cause == STEPS else self._min_decode_s,
                left_batch=self._present,
                overdue=begun.overdue,
            )
        )


def _paced(so_far_s: float, seen_s: float) -> float:
    """Seconds of an iteration with one more that was seen; one that also encoded may be many times as long."""
    if math.isnan(so_far_s) or math.isnan(seen_s):
        return so_far_s if math.isnan(seen_s) else seen_s
    return so_far_s + _SOFT * (min(seen_s, 1.5 * so_far_s) - so_far_s)
