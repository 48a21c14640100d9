"""Who is decoded at each iteration of an RRA phase, for one new request a phase.

Requests that enter with one encoding phase need ``n`` decode iterations each, independent of one another. In the
steady state the requests of k phases ago that still need iteration ``k N_D + u`` are there at iteration u, so
there are ``sum_k P(n >= k N_D + u)`` for each new one. A slot is held for ``ceil(n / N_D)`` phases, hence
``B_E / B_D = 1 / E[ceil(n / N_D)]``. ExeGPT (section 6) has ``E[1 / ceil(n / N_D)]`` there, which by Jensen's
inequality is no smaller: it expects smaller decode batches than there will be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PhaseShares:
    """What each decode iteration of a phase works on, for one new request a phase.

    Attributes:
        seqs: [N_D] sequences; the first is B_D / B_E.
        kv_tokens: [N_D] cached tokens that they read.
        seqs_variance: [N_D] variance of the sequences, over phases of one new request each.
        kv_variance: [N_D] variance of the cached tokens.
    """

    seqs: Floats
    kv_tokens: Floats
    seqs_variance: Floats
    kv_variance: Floats

    def columns(self) -> Floats:
        """[N_D, 4] all of it."""
        return np.column_stack([self.seqs, self.kv_tokens, self.seqs_variance, self.kv_variance])


def phase_shares(task: TaskLengths, steps: int, from_encode: int = 1, *, paper: bool = False) -> PhaseShares:
    """The steady state of phases of ``steps`` decode iterations.

    Args:
        task: Lengths.
        steps: N_D.
        from_encode: Output tokens that come from the encoding.
        paper: Completions as ExeGPT writes them; the variances stay renewal theory's.

    Raises:
        InputError: ``steps`` is above the longest output.
    """
    require_steps(task, steps)
    alive, age = _by_iteration(task, steps, from_encode)
    seqs, prompt = alive.sum(axis=0), task.mean_prompt_tokens
    context = prompt + age
    kv_tokens = (alive * context).sum(axis=0)
    square = task.mean_square_prompt + 2 * age * prompt + age**2
    kv_variance = (alive * square - (alive * context) ** 2).sum(axis=0)
    if paper:
        per_seq = kv_tokens.sum() / seqs.sum() if seqs.any() else prompt
        seqs = _paper_seqs(task, steps, from_encode)
        kv_tokens = seqs * per_seq
    return PhaseShares(seqs, kv_tokens, (alive * (1 - alive)).sum(axis=0), np.maximum(kv_variance, 0.0))


def paper_completions(task: TaskLengths, steps: int, from_encode: int = 0) -> Floats:
    """[N_D] ExeGPT's P_D(U): the share of the decode batch that completes at each iteration of a phase.

    ``P_D(U | n)`` is 1 at ``U = n`` for ``n <= N_D``, else ``1 / ceil(n / N_D)`` at ``U = 1 + (n - 1) mod N_D``.
    Requests that need no decode iteration are left out.
    """
    require_steps(task, steps)
    needs = task.output_pmf[1 + from_encode :]
    if not needs.any():
        return np.zeros(steps)
    n = np.arange(1, len(needs) + 1)
    weight = needs / needs.sum() / -(-n // steps)
    return np.asarray(np.bincount((n - 1) % steps, weights=weight, minlength=steps), dtype=np.float64)


def renewal_completions(task: TaskLengths, steps: int, from_encode: int = 1) -> Floats:
    """[N_D] the share of the decode batch at a phase's start that completes at each iteration."""
    require_steps(task, steps)
    alive, _ = _by_iteration(task, steps, from_encode)
    left = _after(alive)
    start = alive.sum(axis=0)[0]
    return np.zeros(steps) if start == 0 else np.asarray((alive - left).sum(axis=0) / start)


def finish(steps: int, iterations: int) -> tuple[int, int]:
    """(phases, iteration of the last of them) in which a request's ``iterations`` are over."""
    phases = max(1, -(-iterations // steps))
    return phases, iterations - (phases - 1) * steps


def require_steps(task: TaskLengths, steps: int) -> None:
    """Nothing, if a phase of ``steps`` decode iterations is no longer than the longest output.

    Raises:
        InputError: It is, or it has none.
    """
    if not 1 <= steps <= task.max_output_tokens:
        raise InputError(
            f"decode_steps must be from 1 to the longest output ({task.max_output_tokens} tokens); it is {steps}"
        )


def _by_iteration(task: TaskLengths, steps: int, from_encode: int) -> tuple[Floats, Floats]:
    """[phases ago, N_D] share of requests alive, and which of its own iterations each is at."""
    alive = task.decode_survival(from_encode)
    phases = max(1, -(-len(alive) // steps))
    padded = np.zeros(phases * steps)
    padded[: len(alive)] = alive
    age = np.arange(1, phases * steps + 1, dtype=np.float64)
    return padded.reshape(phases, steps), age.reshape(phases, steps)


def _after(alive: Floats) -> Floats:
    """The same, one iteration later in each request's own life."""
    flat = np.append(alive.reshape(-1)[1:], 0.0)
    return flat.reshape(alive.shape)


def _paper_seqs(task: TaskLengths, steps: int, from_encode: int) -> Floats:
    completions = paper_completions(task, steps, from_encode)
    total = completions.sum()
    if total == 0:
        return np.zeros(steps)
    entering = float(task.decode_survival(from_encode)[:1].sum())
    before = np.concatenate([[0.0], np.cumsum(completions)[:-1]])
    return np.asarray(entering / total * (1 - before))


__all__ = [
    "PhaseShares",
    "finish",
    "paper_completions",
    "phase_shares",
    "renewal_completions",
    "require_steps",
]
