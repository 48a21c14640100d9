"""Other systems under the same bound: what they would yield on the same GPUs with the same costs and memory.

Each is played out by the engine with a queue that never runs dry, in every way to cut the cluster into equal replicas,
with batches from one request to what memory holds. The step's budget of tokens is varied where a way of cutting is
near the best, and batches are taken more finely there: what is far behind at some latency is not looked at closer.

Systems differ in how they form steps and in what they keep memory for, and in nothing else. The host's seconds are
those of the tables for all of them, so that an engine of 2022 is not charged for its Python; roofline's
are what vLLM v1 leaves visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lengthwise.schedule._apart import Apart
from lengthwise.schedule._configurations import Configurations, Player
from lengthwise.schedule._curve import Curve, curve_of
from lengthwise.schedule._playing import Streaming, Whole
from lengthwise.schedule._prepared import Setting
from lengthwise.schedule._saturated import Question
from lengthwise.schedule._systems import KNOWN, System
from lengthwise.schedule.estimate import Estimator
from lengthwise.schema.errors import InputError, UnknownNameError

SYSTEMS: tuple[str, ...] = tuple(KNOWN)
"""Names of the systems, by age."""
FEWEST_REQUESTS = 100
NEAR, FINE = 0.1, 0.05
"""How much less throughput than the best at its latency a configuration may have to be looked at closer."""
_PER_OCTAVE = 4


def curve(
    estimator: Estimator,
    system: str,
    *,
    requests: int = 2000,
    seed: int = 0,
    batch_sizes: Sequence[int] | None = None,
    told: Callable[[], None] = lambda: None,
) -> Curve:
    """What a system yields in each configuration worth a look.

    Args:
        estimator: Of the task on the cluster: lengths, tables, memory, and the quantile that bounds are for.
        system: One of ``SYSTEMS``.
        requests: How many are counted in each configuration; down to an eighth where few are served at a time,
            and twice the batch at least.
        seed: Of the lengths; all configurations see lengths of one seed.
        batch_sizes: Sequences on a replica; None: by octaves up to what memory holds, finer near the best.
        told: Called when a configuration was played out.

    Raises:
        UnknownNameError: There is no such system.
        InputError: Too few requests, or a batch below 1.
    """
    if system not in KNOWN:
        raise UnknownNameError("system", system, SYSTEMS)
    if requests < FEWEST_REQUESTS:
        raise InputError(f"requests must be at least {FEWEST_REQUESTS}; they are {requests}")
    if batch_sizes is not None and (not len(batch_sizes) or min(batch_sizes) < 1):
        raise InputError(f"batch_sizes must be whole numbers of at least 1; they are {list(batch_sizes)}")
    tried = Configurations(_player(estimator.setting, KNOWN[system], requests, seed), told)
    if batch_sizes is None:
        _look(tried)
    else:
        for line in tried.lines(every=True):
            tried.go(line, sorted(set(map(int, batch_sizes))), whole=True)
    return curve_of(system, tried.rows)


def _player(setting: Setting, system: System, requests: int, seed: int) -> Player:
    question = Question(setting.task, setting.bound_tokens, setting.assumptions.level, requests, seed)
    kind = Whole if system.whole else Apart if system.apart else Streaming
    return kind(setting, system, question)


def _look(tried: Configurations) -> None:
    """Octaves of every cut, other budgets of those near the best, and finer batches beside the points near the best."""
    for line in tried.lines(every=False):
        tried.go(line, octaves(tried.most(line)))
    for at in tried.near(NEAR):
        for line in tried.siblings(at.line):
            tried.go(line, octaves(tried.most(line)))
    for at in tried.near(FINE):
        tried.go(at.line, _beside(at.batch, tried.most(at.line)), whole=True)


def octaves(most: int) -> list[int]:
    """Powers of two up to ``most``, and it."""
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | ({most} if most > 0 else set()))


def _beside(batch: int, most: int) -> list[int]:
    steps = range(1 - _PER_OCTAVE, _PER_OCTAVE)
    sizes = {round(batch * 2 ** (step / _PER_OCTAVE)) for step in steps}
    return sorted(size for size in sizes if 1 <= size <= most)


__all__ = ["SYSTEMS", "Curve", "curve", "octaves"]
