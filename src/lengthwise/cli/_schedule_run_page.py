"""What ``lengthwise schedule run`` shows and leaves behind."""

from __future__ import annotations

import dataclasses
import json as json_format
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise import measure
from lengthwise.cli._outputs import write_answers
from lengthwise.cli._show import console, print_table
from lengthwise.gateway.follow import News
from lengthwise.gateway.telemetry import as_dict
from lengthwise.report.schedule import tokens_said
from lengthwise.scenario import Adapted, PlannedRun, ScheduleOutcome, ScheduleRun, requests_to_count
from lengthwise.scenario.schedule_outcomes import FEWEST_PHASES
from lengthwise.scenario.schedule_splits import split_in_flight, split_requests
from lengthwise.schema.files import write_whole

if TYPE_CHECKING:
    from lengthwise.scenario import SeenNumber

_HEADS = ("", "planned", "observed", "95 % interval", "observed / planned")
_ENDS = {"steps": "after all iterations", "idle": "since nobody was left", "stalled": "without the slowest"}
VERSION = 1


def show_plan(planned: PlannedRun, engines: int) -> None:
    """Prints what is about to be kept."""
    out, phases = console(), planned.phases
    on = "one engine" if engines == 1 else f"each of {engines} engines"
    if phases is None:
        before = "one router" if engines == 1 else f"each of {engines} routers"
        out.print(f"Keeping {planned.row.words} before {before} ({planned.source})")
        out.print(f"at most {split_in_flight(planned.row)} requests under way there", style="dim")
        return
    out.print(f"Keeping {planned.row.words} on {on} ({planned.source})")
    resized = "" if phases.threshold is None else f", encodings resized within {100 * phases.threshold:g} %"
    out.print(f"at most {phases.most_in_flight} requests at an engine{resized}", style="dim")


def show(played: ScheduleRun) -> None:
    """Prints what was observed beside the plan, whether the bound held, and what is to be doubted."""
    out, outcome, planned = console(), played.outcome, played.planned
    for sentence in followed_said(played):
        out.print(sentence)
    print_table(_HEADS, [_cells(one) for one in outcome.seen])
    if planned.phases is not None:
        _show_ends(outcome)
    out.print(verdict(planned, outcome))
    for doubt in doubts(planned, played):
        out.print(f"doubt: {doubt}", style="dim")


def _show_ends(outcome: ScheduleOutcome) -> None:
    ends = ", ".join(f"{count} {_ENDS[why]}" for why, count in outcome.ended.items())
    console().print(
        f"{outcome.phases} of {outcome.all_phases} phases count (the queue full, batches filled); all ended "
        f"{ends or 'none'}",
        style="dim",
    )


def followed_said(played: ScheduleRun) -> list[str]:
    """What came of following lengths, in sentences; [] where they were not followed."""
    now = played.followed
    if now is None:
        return []
    watched = f"Lengths of {now.observed:,} requests were watched"
    if not played.news:
        alarm = f" {1 / now.false_alarms:,.0f}" if math.isfinite(now.false_alarms) else ""
        still = (
            f"they did not move as far as can be told; evidence {now.evidence:.3g} of the{alarm} of an alarm"
        )
        return [f"{watched}: {still}."]
    said = [sentence for _, one in played.news for sentence in one.said]
    kept = f"{watched}. Below is what came of {played.planned.row.words}, which was kept last, since it was planned."
    return [*said, kept]


def doubts(planned: PlannedRun, played: ScheduleRun) -> list[str]:
    """What speaks against the numbers: the client's doubts, and phases that were longer than the schedule's."""
    found, steps = list(played.measured.doubts), planned.row.decode_steps
    if planned.phases is None:
        return found + split_doubts(played)
    seen = {one.name: one.value for one in played.outcome.seen}["decode iterations, N_D"]
    if seen > 1.1 * steps + 1:
        found.append(
            f"phases had {seen:.3g} iterations in the mean, not {steps}: requests were lacking (--concurrency), or "
            "this machine was too busy to follow the engines' tokens"
        )
    if any(math.isnan(one.low) for one in played.outcome.seen):
        found.append(
            f"where there is no interval, too few phases count: {played.outcome.phases}, and it takes {FEWEST_PHASES} "
            f"of each engine; play more requests (--requests {requests_to_count(planned.row, played.engines)})"
        )
    return found


def split_doubts(played: ScheduleRun) -> list[str]:
    """What speaks against the numbers of a split schedule."""
    found, most = [], played.engines * split_in_flight(played.planned.row)
    under_way = played.outcome.seen[0].value
    if under_way < 0.9 * most:
        found.append(
            f"{under_way:.3g} requests were under way in the mean, of {most} that the schedule has: requests were "
            "lacking (--concurrency, --requests), or latency is shorter than planned"
        )
    if any(math.isnan(one.low) for one in played.outcome.seen):
        found.append(
            f"where there is no interval, too few requests count: {played.outcome.requests}; play more "
            f"(--requests {split_requests(played.planned.row, played.engines)})"
        )
    return found


def verdict(planned: PlannedRun, outcome: ScheduleOutcome) -> str:
    """Whether the bound held, in a sentence."""
    if math.isinf(planned.bound_s):
        return "There was no bound to hold."
    bound = f"the bound of {planned.bound_s:g} s"
    if outcome.held is None:
        return f"Whether {bound} held is not known: no request was served with a full queue. Play more (--requests)."
    latency = outcome.seen[-1]
    end = f"{latency.high:.3g}" if math.isfinite(latency.high) else "?"
    said = (
        f"{100 * planned.share:.3g} % of {outcome.requests:,} requests, as many as a bound for outputs of "
        f"{tokens_said(planned.bound_tokens)} is for, were served within {latency.value:.3g} s "
        f"[{latency.low:.3g} to {end}]"
    )
    doubt = "" if outcome.sure else ", but the interval reaches beyond it: play more (--requests) to be sure"
    return f"{bound[0].upper()}{bound[1:]} {'held' if outcome.held else 'did not hold'}: {said}{doubt}."


def as_json(played: ScheduleRun) -> dict[str, Any]:
    """All of it under stable keys; what is infinite or not known is null."""
    outcome, planned, followed = played.outcome, played.planned, played.followed
    told = {
        "format": "lengthwise.schedule-run",
        "version": VERSION,
        "answer": verdict(planned, outcome),
        "schedule": dataclasses.asdict(planned.row),
        "phases": None if planned.phases is None else dataclasses.asdict(planned.phases),
        "bound_tokens": planned.bound_tokens,
        "share": planned.share,
        "source": planned.source,
        "outcome": dataclasses.asdict(outcome),
        "doubts": doubts(planned, played),
        "followed": None if followed is None else dataclasses.asdict(followed),
        "news": [_told(at_s, one) for at_s, one in played.news],
    }
    plain: dict[str, Any] = _plain(told)
    return plain


def _told(at_s: float, news: News) -> dict[str, Any]:
    """What came of lengths that moved, without what only programs can use."""
    more = news.more.adaptation if isinstance(news.more, Adapted) else None
    return {
        "at_s": at_s,
        "said": news.said,
        "failed": news.failed,
        "schedule": news.schedule,
        "phases": None if news.phases is None else dataclasses.asdict(news.phases),
        "adaptation": None if more is None else dataclasses.asdict(more),
    }


def write(played: ScheduleRun, json: Path | None, out: Path | None) -> list[Path]:
    """Writes what was asked for and returns the files."""
    text = json_format.dumps(as_json(played), indent=2, ensure_ascii=False) + "\n"
    written = write_answers(json, None, lambda path: write_whole(path, text.encode()), lambda _: None)
    if out is None:
        return written
    out.mkdir(parents=True, exist_ok=True)
    lines = {
        "phases.jsonl": [dataclasses.asdict(phase) for phase in played.phases],
        "requests.jsonl": [as_dict(row) for row in played.rows],
    }
    for name, rows in lines.items():
        whole = "".join(json_format.dumps(_plain(one)) + "\n" for one in rows)
        write_whole(out / name, whole.encode())
    write_whole(out / "outcome.json", text.encode())
    measure.write_records(played.measured, out / "records.parquet")
    return [*written, *(out / name for name in (*lines, "outcome.json", "records.parquet"))]


def _cells(seen: SeenNumber) -> list[str]:
    unit = f" {seen.unit}" if seen.unit else ""
    known = math.isfinite(seen.low)
    interval = f"{_number(seen.low)} to {_number(seen.high)}" if known else ""
    ratio = seen.value / seen.planned if seen.planned else math.nan
    return [
        seen.name,
        f"{_number(seen.planned)}{unit}",
        f"{_number(seen.value)}{unit}",
        interval,
        f"{ratio:.2f}" if math.isfinite(ratio) else "",
    ]


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "?"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
