"""At this load, is length-aware scheduling worth it? In words, and plainly where it is not."""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.schema.estimate import Estimate
from lengthwise.schema.lab import FCFS, ORACLE, Cell, LoadUnit, Verdict

NO_QUEUE = 0.01
"""Where fewer requests find every seat taken, there is no queue to speak of."""
LEAST_GAIN = 0.01
"""A smaller gain in mean JCT is not worth the trouble, however sure it is."""

WORTH, IDLE, NONE, TAIL = "worth it", "no queue", "no gain", "the tail pays"


def verdict(cells: Sequence[Cell]) -> Verdict:
    """What the cells of one load and batch size say; FCFS and the oracle are the first two.

    It is worth it where some policy, with a predictor that one can have, is surely faster than FCFS in
    the mean, by at least 1 %, and costs the 99th percentile no more than it gains the mean.
    """
    fcfs, oracle = cells[0], cells[1]
    here = (fcfs.batch, fcfs.load)
    if fcfs["found_full"].value < NO_QUEUE and _gain(oracle) < LEAST_GAIN:
        return Verdict(*here, False, IDLE, "", _no_queue(fcfs))
    candidates = _candidates(cells)
    faster = [cell for cell in candidates if _surely_faster(cell)]
    bearable = [cell for cell in faster if _tail(cell) <= _gain(cell)]
    if bearable:
        best = max(bearable, key=_gain)
        return Verdict(*here, True, WORTH, best.name, _worth(best, oracle))
    if faster:
        best = max(faster, key=lambda cell: _gain(cell) - _tail(cell))
        return Verdict(*here, False, TAIL, best.name, _tail_pays(best))
    best = max(candidates, key=_gain, default=oracle)
    return Verdict(*here, False, NONE, best.name, _no_gain(best, oracle))


def answer(verdicts: Sequence[Verdict], unit: LoadUnit) -> tuple[str, ...]:
    """All verdicts in a few sentences: those that end alike together, one of them in full."""
    lines = []
    for reason in (WORTH, TAIL, NONE, IDLE):
        alike = [v for v in verdicts if v.reason == reason]
        if alike:
            head = "Worth it" if reason == WORTH else "Not worth it"
            where = "at every load and batch size" if len(alike) == len(verdicts) else _places(alike, unit)
            shown = alike[-1] if reason == WORTH else alike[0]
            of = f" For instance {_place(shown, unit)}:" if len(alike) > 1 else ""
            lines.append(f"{head} {where}.{of} {shown.sentence}")
    return tuple(lines)


def _candidates(cells: Sequence[Cell]) -> list[Cell]:
    """Who could be had: predictors that know the lengths only where nothing else was asked about."""
    own = [cell for cell in cells[2:] if cell.policy != FCFS]
    real = [cell for cell in own if cell.predictor != ORACLE]
    return real or own


def _gain(cell: Cell) -> float:
    return 1 - cell["jct.mean/fcfs"].value


def _tail(cell: Cell) -> float:
    return cell["jct.p99/fcfs"].value - 1


def _surely_faster(cell: Cell) -> bool:
    """With a single seed there is no interval to doubt."""
    shorter: Estimate = cell["jct.mean/fcfs"]
    sure = shorter.high < 1 if shorter.has_interval else shorter.value < 1
    return sure and _gain(cell) >= LEAST_GAIN


def _no_queue(fcfs: Cell) -> str:
    share = fcfs["found_full"].value
    return (
        f"Everything fits the batch: {_percent(share)} of the requests find all seats taken, and no order "
        "shortens a queue that is not there."
    )


def _worth(best: Cell, oracle: Cell) -> str:
    closed = best["gap_closed"]
    share = (
        f", {_percent(closed.value)} of what perfect lengths would bring"
        if closed.value == closed.value
        else ""
    )
    return (
        f"{best.name} cuts mean JCT by {_interval(best)}{share}; the 99th percentile "
        f"{_change(best['jct.p99/fcfs'].value)}, that of the oracle {_change(oracle['jct.p99/fcfs'].value)}."
    )


def _tail_pays(best: Cell) -> str:
    return (
        f"{best.name} cuts mean JCT by {_interval(best)}, but the 99th percentile "
        f"{_change(best['jct.p99/fcfs'].value)}: the tail pays more than the mean gains. A bound on waiting "
        "(max_wait_s) or ageing trades some of the one for the other."
    )


def _no_gain(best: Cell, oracle: Cell) -> str:
    perfect = 1 - oracle["jct.mean/fcfs"].value
    return (
        f"The best that was tried, {best.name}, changes mean JCT by {_interval(best, sign=True)}; "
        f"perfect lengths would cut it by {_percent(perfect)}."
    )


def _interval(cell: Cell, *, sign: bool = False) -> str:
    shorter = cell["jct.mean/fcfs"]
    value = 100 * (shorter.value - 1) * (1 if sign else -1)
    half = f" ± {100 * shorter.half_width:.1f}" if shorter.has_interval else ""
    return f"{value:+.1f}{half} %" if sign else f"{value:.1f}{half} %"


def _change(ratio: float) -> str:
    change = 100 * (ratio - 1)
    if abs(change) < 0.5:
        return "stays as it is"
    return f"{'grows' if change > 0 else 'falls'} by {abs(change):.0f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def _places(alike: Sequence[Verdict], unit: LoadUnit) -> str:
    """Loads by batch size, batch sizes with the same loads together."""
    loads: dict[int, list[float]] = {}
    for v in alike:
        loads.setdefault(v.batch, []).append(v.load)
    groups: dict[tuple[float, ...], list[int]] = {}
    for batch, of_batch in loads.items():
        groups.setdefault(tuple(of_batch), []).append(batch)
    parts = [f"at {_load_list(ls, unit)} (batch {', '.join(map(str, bs))})" for ls, bs in groups.items()]
    return " and ".join(parts)


def _load_list(loads: Sequence[float], unit: LoadUnit) -> str:
    texts = [unit.text(load) for load in loads]
    first, *rest = (text.partition(" ") for text in texts)
    if unit is not LoadUnit.CAPACITY:
        return f"{', '.join(text.partition(' ')[0] for text in texts)} {first[2]}"
    return f"{', '.join([first[0], *(r[0] for r in rest)])} {first[2]}"


def _place(v: Verdict, unit: LoadUnit) -> str:
    return f"at {unit.text(v.load)}, batch {v.batch}"
