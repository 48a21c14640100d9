"""The HTML page of an application: its plan, its run, or both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.report import apps_text as text
from lengthwise.report.apps_text import IDLE_REASONS, AppFacts, duration_text, estimate_duration_text, time_scale
from lengthwise.report.curves import json_number
from lengthwise.report.formatting import TIMES, UNKNOWN, counted, percent
from lengthwise.report.html_page import write_page
from lengthwise.schema.app import AppPlan, AppSpan

MODEL_HEADS = ("model", "answers", "output tokens", "tokens/s while running", "planned to run", "ran")
STAGE_HEADS = ("stage", "from", "to", "model", "dp", "tp", "pp", "GPUs", "on", "made ready", "finishes first")
METHOD_HEADS = ("method", "makespan", "on the planning samples", "search", "stages", "relative end-to-end time")
WHAT_IF_HEADS = ("with", "makespan", "difference")
MAX_MARKS = 60  # largest number of stages that a chart marks; more lines would hide the bars

Lane = tuple[str, int]  # a row of a chart: ("", GPU number), or (model, number of a given engine)
OPENING_EVENTS = {"start": "load", "wake": "load", "ready": "run"}
CLOSING_EVENTS = ("stop", "sleep", "died")
FINAL_STATES = ("done", "skipped", "dead", "blocked")


def write_app_html(
    path: Path | str, plan: AppPlan | None, app_metadata: AppFacts, models: Sequence[str] | None = None
) -> None:
    """Write an HTML page of an application's plan, its run, or both.

    ``plan`` is None if the engines of the run were given. In this case ``models`` has the names of the models.
    """
    names = list(plan.models if plan is not None else models or ())
    manifest = app_metadata.manifest
    answers = list(text.sentences(plan, app_metadata)) if plan is not None and manifest is None else []
    if manifest is not None:
        answers = list(_outcome(plan, names, app_metadata, manifest))
    context: dict[str, Any] = {"models": [], "stages": [], "idle": [], "methods": [], "what_ifs": [], "assumptions": []}
    if manifest is not None:
        context["models"] = [_model_row(plan, k, name, app_metadata, manifest) for k, name in enumerate(names)]
    if plan is not None:
        context |= plan_tables(plan, app_metadata)
    write_page(
        path,
        "apps",
        data=figures(plan, names, app_metadata),
        heading=app_metadata.name or "An application",
        metadata=app_metadata.metadata,
        cards=cards(plan, app_metadata),
        answers=answers,
        has_run=manifest is not None,
        has_plan=plan is not None,
        names=names,
        idle_kinds=[
            (kind, words)
            for kind, words in IDLE_REASONS.items()
            if plan is not None and any(span.what == kind for span in plan.spans)
        ],
        heads={"models": MODEL_HEADS, "stages": STAGE_HEADS, "methods": METHOD_HEADS, "what_ifs": WHAT_IF_HEADS},
        **context,
    )


def cards(plan: AppPlan | None, app_metadata: AppFacts) -> list[tuple[str, str, str]]:
    """Return the numbers of a run and of its plan, as (label, value, interval or note)."""
    cards: list[tuple[str, str, str]] = []
    if (manifest := app_metadata.manifest) is not None:
        states = manifest["counts"].get("all", {})
        done, total = states.get("done", 0), sum(states.values())
        cards = [
            ("The run took", duration_text(manifest["seconds"]), manifest["how"]),
            ("Tasks done", f"{done:,}", f"of {total:,}"),
        ]
    if plan is None:
        return cards
    low, high = plan.quantiles_s.get(0.05), plan.quantiles_s.get(0.95)
    between = "" if low is None or high is None else f"90 % of samples: {duration_text(low)} to {duration_text(high)}"
    gpus = len(app_metadata.gpus) or 1 + max((span.gpu for span in plan.spans), default=0)
    idle = text.idle_shares(plan, gpus)
    cards += [
        ("Planned makespan" if manifest else "Makespan", estimate_duration_text(plan.makespan), between),
        ("GPUs", str(gpus), counted(len(plan.stages), "stage")),
        (
            "GPU time without work",
            percent(sum(share for _, share in idle)),
            f"mostly: {IDLE_REASONS.get(idle[0][0], idle[0][0])}" if idle else "",
        ),
    ]
    others = [one for one in plan.methods if one.name != plan.method]
    if others:
        best = min(others, key=lambda one: one.makespan.value)
        cards.append(
            ("Best other method", estimate_duration_text(best.makespan), "method " + best.name.replace("_", " "))
        )
    return cards


def _outcome(
    plan: AppPlan | None, models: Sequence[str], app_metadata: AppFacts, manifest: Mapping[str, Any]
) -> Iterator[str]:
    states = manifest["counts"].get("all", {})
    counts = [f"{states[name]:,} {name}" for name in FINAL_STATES if states.get(name)]
    remaining = sum(count for name, count in states.items() if name not in FINAL_STATES)
    outcomes = {"done": "The run finished", "stopped": "The run was stopped", "cancelled": "The run was cancelled"}
    outcomes["failed"] = "Engines of the run failed"
    end = f"{outcomes.get(manifest['how'], manifest['how'])} after {duration_text(manifest['seconds'])}"
    yield f"{end}: {', '.join(counts) or 'nothing done'}{f', {remaining:,} unfinished' if remaining else ''}."
    if plan is not None:
        low, high = plan.quantiles_s.get(0.05), plan.quantiles_s.get(0.95)
        planned = f"Planned makespan {estimate_duration_text(plan.makespan)}"
        if low is not None and high is not None:
            planned += f" (nine of ten samples: {duration_text(low)} to {duration_text(high)})"
        change = manifest["seconds"] / plan.makespan.value - 1.0 if plan.makespan.value > 0 else 0.0
        if manifest["how"] != "done" or manifest["resumed"] or not plan.makespan.value > 0:
            yield f"{planned}, for the complete application in one run."
        elif abs(change) < 0.005:
            yield f"{planned}; the run took as long."
        else:
            yield f"{planned}; the run was {abs(100 * change):.0f} % {'longer' if change > 0 else 'shorter'}."
    events = Counter(event["what"] for event in manifest["events"])
    if events["died"]:
        yield f"Engines died {counted(events['died'], 'time')}; their unfinished tasks were dispatched again."
    if events["replan"]:
        yield f"The plan was renewed {counted(events['replan'], 'time')}, from the state of the run."
    for one in manifest.get("silent", ()):
        yield f"At the end {one['words']}, since {duration_text(one['since_s'])} of the run."
    if manifest["resumed"]:
        yield "The run continued one that was stopped; charts and times cover only the last part."
    if unanswered := [name for name in models if not app_metadata.answers.get(name)]:
        yield f"Without an answer: {', '.join(unanswered)}."


def plan_tables(plan: AppPlan, app_metadata: AppFacts) -> dict[str, Any]:
    """Return the rows of a plan's tables as texts: stages, idle GPU time, methods, what-ifs; and its assumptions."""
    stages = []
    for number, stage in enumerate(plan.stages, 1):
        switches = text.slowest_switches(stage)
        when = [str(number), duration_text(stage.start_s), duration_text(stage.end_s)]
        for one in stage.plans:
            how, ready_s = switches.get(one.model, ("", 0.0))
            gpus_used = text.gpus_text(one, is_mixed=app_metadata.is_mixed)
            placed = " ".join(",".join(map(str, replica)) for replica in stage.placement.get(one.model, ()))
            ready = f"{how} {duration_text(ready_s)}" if how else ""
            end = "yes" if stage.ends_by == one.model else ""
            degrees = map(str, (one.dp, one.tp, one.pp))
            stages.append([*when, plan.models[one.model], *degrees, gpus_used, placed, ready, end])
            when = ["", "", ""]
    gpus = len(app_metadata.gpus) or 1 + max((span.gpu for span in plan.spans), default=0)
    total_s = gpus * (plan.stages[-1].end_s if plan.stages else 0.0)
    shares = text.idle_shares(plan, gpus)
    busy = max(0.0, 1.0 - sum(share for _, share in shares))
    planned_s = plan.makespan.value
    times = [("models run", busy), *((IDLE_REASONS.get(name, name), share) for name, share in shares)]
    methods = []
    for method in plan.methods:
        took = (duration_text(method.planned_s), duration_text(method.search_s), str(method.stages))
        name, makespan = method.name.replace("_", " "), estimate_duration_text(method.makespan)
        methods.append([name, makespan, *took, text.gain_text(plan, method)])
    return {
        "stages": stages,
        "idle": [[name, percent(share), duration_text(share * total_s)] for name, share in times],
        "methods": methods,
        "what_ifs": [
            [text.what_if_text(w), estimate_duration_text(w.makespan), text.difference_text(w.difference, planned_s)]
            for w in plan.what_ifs
        ],
        "assumptions": plan.notes,
    }


@dataclass(frozen=True)
class EngineSpan:
    """A period in which an engine loads or runs a model, on one GPU or at a given address."""

    lane: Lane
    model: str
    what: str  # "load" or "run"
    start_s: float
    end_s: float
    ended_by: str = ""  # an event; "" at the run's end


def _has_given_engines(manifest: Mapping[str, Any]) -> bool:
    return any(plan["gpu"] == "given" for stage in manifest.get("plan", ()) for plan in stage)


def _engine_spans(manifest: Mapping[str, Any]) -> list[EngineSpan]:
    is_given = _has_given_engines(manifest)
    open_spans: dict[Lane, tuple[str, str, float]] = {}
    found: list[EngineSpan] = []

    def close(lane: Lane, end_s: float, event: str) -> None:
        model, what, start_s = open_spans.pop(lane, ("", "", end_s))
        if end_s > start_s:
            found.append(EngineSpan(lane, model, what, start_s, end_s, event))

    for event in manifest["events"]:
        kind, at_s, model = event["what"], float(event["at_s"]), event["model"]
        for gpu in event["gpus"] if model else ():
            lane = (model if is_given else "", gpu)
            if kind in OPENING_EVENTS or kind in CLOSING_EVENTS:
                close(lane, at_s, kind)
            if kind in OPENING_EVENTS:
                open_spans[lane] = (model, OPENING_EVENTS[kind], at_s)
    for lane in list(open_spans):
        close(lane, float(manifest["seconds"]), "")
    return found


def _model_row(
    plan: AppPlan | None, model: int, name: str, app_metadata: AppFacts, manifest: Mapping[str, Any]
) -> list[str]:
    planned = [s for s in plan.spans if s.model == model and s.what == "run"] if plan is not None else []
    ran = [s for s in _engine_spans(manifest) if s.model == name and s.what == "run"]
    ran_s = union_s([(span.start_s, span.end_s) for span in ran])
    tokens = app_metadata.tokens.get(name, 0)
    periods = [
        f"{duration_text(min(s.start_s for s in spans))} to {duration_text(max(s.end_s for s in spans))}"
        if spans
        else UNKNOWN
        for spans in (planned, ran)
    ]
    # A resumed run recorded tokens in earlier parts, whose time is not in the manifest.
    rate = f"{tokens / ran_s:,.0f}" if ran_s > 0 and not manifest["resumed"] else UNKNOWN
    return [name, f"{app_metadata.answers.get(name, 0):,}", f"{tokens:,}", rate, *periods]


def union_s(spans: Sequence[tuple[float, float]]) -> float:
    """Return how many seconds the (start, end) spans cover together."""
    total, until_s = 0.0, 0.0
    for start_s, end_s in sorted(spans):
        total += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total


Bar = tuple[int, float, float, int, str, str, str]
"""Row, start and end in seconds, model number (-1: none), kind as in AppSpan, label, hover text."""


def figures(plan: AppPlan | None, models: Sequence[str], app_metadata: AppFacts) -> dict[str, Any]:
    """Return the bars of a Gantt chart for the plan and for the run, in one unit of time."""
    charts: list[tuple[str, list[str], list[Bar], list[float]]] = []
    if plan is not None:
        rows = list(app_metadata.gpus) or [f"GPU {k}" for k in range(1 + max((s.gpu for s in plan.spans), default=0))]
        charts.append(("plan", rows, [_planned_bar(s, models) for s in plan.spans], [s.end_s for s in plan.stages]))
    manifest = app_metadata.manifest
    if manifest is not None:
        lanes = _lanes(manifest, app_metadata.gpus)
        row_of, number_of = {lane: row for row, lane in enumerate(lanes)}, {name: k for k, name in enumerate(models)}
        bars = []
        for span in _engine_spans(manifest):
            died = ", then its engine died" if span.ended_by == "died" else ""
            state = "runs" if span.what == "run" else "is loaded"
            hover = f"{span.model} {state}{died}\n{_period(span.start_s, span.end_s)}"
            label = "died" if died else ""
            model = number_of.get(span.model, -1)
            bars.append((row_of[span.lane], span.start_s, span.end_s, model, span.what, label, hover))
        charts.append(("run", list(lanes.values()), bars, []))
    end_s = max((bar[2] for _, _, bars, _ in charts for bar in bars), default=0.0)
    scale, unit = time_scale(end_s)

    def at(seconds: float) -> float | None:
        return json_number(seconds / scale, 6)

    figures = []
    for name, rows, bars, marks in charts:
        scaled = [[row, at(from_s), at(to_s), *rest] for row, from_s, to_s, *rest in bars]
        shown = list(map(at, marks)) if len(marks) <= MAX_MARKS else []
        figures.append({"id": name, "rows": rows, "bars": scaled, "marks": shown})
    return {"unit": unit, "end": at(end_s), "models": list(models), "charts": figures}


def _planned_bar(span: AppSpan, models: Sequence[str]) -> Bar:
    name = models[span.model] if span.model >= 0 else ""
    label, how = "", ""
    if span.plan is not None:
        dp, tp, pp = span.plan.dp, span.plan.tp, span.plan.pp
        label = f"{dp}{TIMES}{tp}" + (f"{TIMES}{pp}" if pp > 1 else "")
        how = f", {text.shape(span.plan)} (dp {TIMES} tp {TIMES} pp: {dp}, {tp}, {pp})"
    idle = f"idle: {IDLE_REASONS.get(span.what, span.what)}" + (f" ({name})" if name else "")
    words = {"run": f"{name} runs{how}", "load": f"{name} is loaded{how}"}.get(span.what, idle)
    hover = f"{words}\n{_period(span.start_s, span.end_s)}"
    return span.gpu, span.start_s, span.end_s, span.model, span.what, label if span.what == "run" else "", hover


def _period(start_s: float, end_s: float) -> str:
    return f"{duration_text(start_s)} to {duration_text(end_s)}, {duration_text(end_s - start_s)}"


def _lanes(manifest: Mapping[str, Any], gpus: Sequence[str]) -> dict[Lane, str]:
    if _has_given_engines(manifest):
        engines = sorted({(e["model"], gpu) for e in manifest["events"] if e["model"] for gpu in e["gpus"]})
        return {(model, gpu): f"{model} {gpu}" for model, gpu in engines}
    used = {gpu for event in manifest["events"] for gpu in event["gpus"]}
    count = max(len(gpus), 1 + max(used, default=-1))
    return {("", k): gpus[k] if k < len(gpus) else f"GPU {k}" for k in range(count)}
