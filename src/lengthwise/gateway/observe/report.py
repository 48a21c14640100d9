"""A look back for people: at a journal, whenever one likes."""

from __future__ import annotations

from pathlib import Path

from lengthwise.gateway.config import Order
from lengthwise.gateway.observe.finding import Change, Gain
from lengthwise.gateway.observe.gain import DRAWS, gain
from lengthwise.gateway.observe.trace import of_journal

_NAMES = {
    "srtf": "srtf (shortest predicted first)",
    "isrtf": "isrtf (and cuts, re-predicted)",
    "oracle": "lengths known, no cuts",
}


def report(path: Path | str, order: Order = Order(), *, draws: int = DRAWS, seed: int = 0) -> Gain:  # noqa: B008
    """What length-aware order would have gained on a journal's traffic.

    Raises:
        InputError: It is no journal, or cannot be read.
    """
    return gain(of_journal(path), order, draws=draws, seed=seed)


def text_report(found: Gain) -> str:
    """The finding as lines of text."""
    lines = [f"Verdict: {found.verdict}", found.sentence, ""]
    lines.append(f"{found.requests} requests over {_duration(found.span_s)}")
    if not found.orders:
        return "\n".join(lines)
    lines.append(f"{100 * found.waited_share:.1f} % of all time from arrival to end was waiting for a seat")
    for service in found.services:
        seats = "not met" if service.seats is None else f"{service.seats} at a time"
        step = f"{1e3 * service.step_s:.3g} ms + {1e3 * service.seq_s:.3g} ms a sequence"
        prompt = f"{1e3 * service.prompt_s:.3g} ms a prompt token"
        lines.append(
            f"{service.engines} engine(s): a step {step} + {prompt} (off by {100 * service.error:.0f} % in the "
            f"median); limit {seats}"
        )
    lines += ["", f"{'':34}{'mean JCT':>10}  {'change':<30}{'P99 JCT':>10}  change"]
    lines.append(f"{'as it was':34}{found.observed_jct_s:>8.3f} s")
    lines.append(f"{'fcfs (simulated)':34}{found.fcfs_jct_s:>8.3f} s  {'':<30}{found.fcfs_p99_jct_s:>8.3f} s")
    for one in found.orders:
        lines.append(
            f"{_NAMES[one.name]:34}{one.mean_jct_s:>8.3f} s  {_change(one.mean):<30}{one.p99_jct_s:>8.3f} s  "
            f"{_change(one.p99)}"
        )
    lines.append(f"{'isrtf against srtf':34}{'':>10}  {_change(found.cuts)}")
    lines += ["", f"Intervals: {100 * found.level:g} % each, by drawing stretches of this traffic anew."]
    return "\n".join(lines)


def _change(change: Change) -> str:
    return f"{100 * change.value:+.1f} % ({100 * change.low:+.1f} to {100 * change.high:+.1f})"


def _duration(span_s: float) -> str:
    for unit, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if span_s >= 2 * seconds:
            return f"{span_s / seconds:.1f} {unit}"
    return f"{span_s:.0f} seconds"
