"""Plans and runs of applications to people: what runs where and when, and what it comes to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lengthwise.report.apps_text import (
    TIMES,
    WHY,
    AppFacts,
    difference,
    gpus_had,
    idle_shares,
    scale_of,
    sentences,
    shape,
    supposed,
    switched,
    took,
    took_about,
)
from lengthwise.report.formatting import UNKNOWN, percent
from lengthwise.report.html_document import SERIES, asset, document, header, plotly_js, scrolling, section, swatch
from lengthwise.schema.app import AppPlan, AppSpan, AppStage
from lengthwise.schema.files import write_whole

Lane = tuple[str, int]
"""A row of the chart: ("", a GPU's number), or (a model, the number of a given engine)."""
_OPENS = {"start": "load", "wake": "load", "ready": "run"}
_CLOSES = ("stop", "sleep", "died")


@dataclass(frozen=True)
class Spell:
    """What one GPU, or one given engine, did for a while.

    Attributes:
        lane: Whose row it is in.
        model: Its name.
        what: "load" or "run".
        start_s: From when.
        end_s: Until when.
        finished: The event that ended it; "": the run's end.
    """

    lane: Lane
    model: str
    what: str
    start_s: float
    end_s: float
    finished: str = ""


def is_given(manifest: Mapping[str, Any]) -> bool:
    """Whether its engines were run by others, so that nobody knows their GPUs."""
    return any(plan["gpu"] == "given" for stage in manifest.get("plan", ()) for plan in stage)


def lanes_of(manifest: Mapping[str, Any], gpus: Sequence[str]) -> dict[Lane, str]:
    """The rows and their names."""
    if not is_given(manifest):
        used = {gpu for event in manifest["events"] for gpu in event["gpus"]}
        count = max(len(gpus), 1 + max(used, default=-1))
        return {("", k): gpus[k] if k < len(gpus) else f"GPU {k}" for k in range(count)}
    engines = sorted({(e["model"], gpu) for e in manifest["events"] if e["model"] for gpu in e["gpus"]})
    return {(model, gpu): f"{model} {gpu}" for model, gpu in engines}


def spells_of(manifest: Mapping[str, Any]) -> list[Spell]:
    """What each did, in the order of events."""
    given, end_s = is_given(manifest), float(manifest["seconds"])
    open_: dict[Lane, tuple[str, str, float]] = {}
    found: list[Spell] = []

    def close(lane: Lane, at_s: float, by: str) -> None:
        if lane in open_:
            model, what, start_s = open_.pop(lane)
            if at_s > start_s:
                found.append(Spell(lane, model, what, start_s, at_s, by))

    for event in manifest["events"]:
        what, at_s = event["what"], float(event["at_s"])
        for gpu in event["gpus"] if event["model"] else ():
            lane = (event["model"], gpu) if given else ("", gpu)
            if what in _OPENS or what in _CLOSES:
                close(lane, at_s, what)
            if what in _OPENS:
                open_[lane] = (event["model"], _OPENS[what], at_s)
    for lane in list(open_):
        close(lane, end_s, "")
    return found


def worked_s(spells: Sequence[Spell]) -> dict[str, tuple[float, float]]:
    """By model, when an engine of it was first ready and when the last one ended."""
    found: dict[str, tuple[float, float]] = {}
    for spell in spells:
        if spell.what == "run":
            first, last = found.get(spell.model, (spell.start_s, spell.end_s))
            found[spell.model] = (min(first, spell.start_s), max(last, spell.end_s))
    return found


def happened(manifest: Mapping[str, Any]) -> dict[str, int]:
    """How often each kind of event was."""
    found: dict[str, int] = {}
    for event in manifest["events"]:
        found[event["what"]] = found.get(event["what"], 0) + 1
    return found


MODEL_HEADS = ("model", "answers", "output tokens", "tokens/s while it ran", "planned to run", "ran")
_ENDED = ("done", "skipped", "dead", "blocked")


def outcome(plan: AppPlan | None, models: Sequence[str], app_metadata: AppFacts) -> list[str]:
    """How a run ended, a sentence each; nothing where there was none."""
    metadata = app_metadata.manifest
    if metadata is None:
        return []
    return [
        *_finished(metadata),
        *_additional(plan, metadata),
        *_troubles(metadata),
        *_unheard(metadata),
        *_resumed(metadata, models, app_metadata),
    ]


def _finished(metadata: Mapping[str, Any]) -> Iterator[str]:
    states = metadata["counts"].get("all", {})
    told = ", ".join(f"{states[name]:,} {name}" for name in _ENDED if states.get(name))
    left = sum(count for name, count in states.items() if name not in _ENDED)
    how = {
        "done": "The run is over",
        "stopped": "The run was stopped",
        "cancelled": "The run was cancelled",
        "failed": "Engines of the run failed",
    }
    rest = f", {left:,} not yet" if left else ""
    yield f"{how.get(metadata['how'], metadata['how'])} after {took(metadata['seconds'])}: {told or 'nothing'}{rest}."


def _additional(plan: AppPlan | None, metadata: Mapping[str, Any]) -> Iterator[str]:
    if plan is None:
        return
    told = f"Planned were {took_about(plan.makespan)}"
    low, high = plan.quantiles_s.get(0.05), plan.quantiles_s.get(0.95)
    if low is not None and high is not None:
        told += f" (nine draws of ten: {took(low)} to {took(high)})"
    if metadata["how"] != "done" or metadata["resumed"] or not plan.makespan.value > 0:
        yield f"{told}, for the whole of it at one go."
        return
    change = metadata["seconds"] / plan.makespan.value - 1.0
    apart = f"{abs(change):.0%} {'longer' if change > 0 else 'shorter'}".replace("%", " %")
    yield f"{told}; it took {'as long' if abs(change) < 0.005 else apart}."


def _troubles(metadata: Mapping[str, Any]) -> Iterator[str]:
    counts = happened(metadata)
    if died := counts.get("died"):
        yield f"Engines died {died} time{'s' if died > 1 else ''}; what they worked on was asked again."
    if replanned := counts.get("replan"):
        yield f"The plan was made anew {replanned} time{'s' if replanned > 1 else ''}, as the run had left it."


def _unheard(metadata: Mapping[str, Any]) -> Iterator[str]:
    for one in metadata.get("silent", ()):
        yield f"At its end {one['words']}, since {took(one['since_s'])} of the run."


def _resumed(metadata: Mapping[str, Any], models: Sequence[str], app_metadata: AppFacts) -> Iterator[str]:
    if metadata["resumed"]:
        yield "It went on with a run that was stopped before; charts and seconds are of the last part alone."
    if silent := [name for name in models if not app_metadata.answers.get(name)]:
        yield f"Without an answer: {', '.join(silent)}."


def model_cells(plan: AppPlan | None, model: int, name: str, app_metadata: AppFacts) -> list[str]:
    """A model as cells under ``MODEL_HEADS``."""
    assert app_metadata.manifest is not None
    spans = [s for s in plan.spans if s.model == model and s.what == "run"] if plan is not None else []
    planned = f"{took(min(s.start_s for s in spans))} to {took(max(s.end_s for s in spans))}" if spans else UNKNOWN
    spells = spells_of(app_metadata.manifest)
    ran = worked_s(spells).get(name)
    tokens = app_metadata.tokens.get(name, 0)
    ran_s = union_s([(s.start_s, s.end_s) for s in spells if s.model == name and s.what == "run"])
    is_whole = ran_s > 0 and not app_metadata.manifest["resumed"]
    return [
        name,
        f"{app_metadata.answers.get(name, 0):,}",
        f"{tokens:,}",
        f"{tokens / ran_s:,.0f}" if is_whole else UNKNOWN,
        planned,
        f"{took(ran[0])} to {took(ran[1])}" if ran else UNKNOWN,
    ]


def union_s(spells: Sequence[tuple[float, float]]) -> float:
    """Seconds that are in any of these spans."""
    total, until_s = 0.0, 0.0
    for start_s, end_s in sorted(spells):
        total += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total


STAGE_HEADS = ("stage", "from", "to", "model", "dp", "tp", "pp", "GPUs", "on", "made ready", "ends as finished")
METHOD_HEADS = ("method", "makespan", "on the draws planned with", "search", "stages", "times as long, end to end")
WHAT_IF_HEADS = ("with", "makespan", "difference")
PLAN_NOTE = (
    "A row is a GPU. Filled: a model runs, its replicas and the GPUs of each (dp, tp, pp) written in it; striped: it "
    "is loaded; pale: the GPU has no work, and why. Dotted lines: a stage ends. On the first draw of lengths planned "
    "with."
)
RUN_NOTE = (
    "What engines did in the run, by the same clock: filled from when an engine was ready until it was stopped, "
    "striped while it was started or woken; empty: no engine."
)
METHOD_NOTE = (
    "All on the same draws. End to end: the makespan and the search. max: all GPUs to one model after another; min: as "
    "many models at once as there is room for; samullm: Algorithm 1 of its paper; lengthwise: the best of all of these "
    "and of what a look ahead finds. Without preemption a model that runs keeps its plan until it is done."
)
WHAT_IF_NOTE = "Planned anew for each, and told on the same draws as the plan."
STAGE_NOTE = "A stage ends when the first of its models has finished. On the first draw of lengths planned with."
TERMS = f"""<dl class="notes">
<dt>dp, tp, pp</dt><dd>replicas of a model; GPUs that each layer is cut over; stages that the layers are cut into</dd>
<dt>Makespan</dt><dd>from the start until the last answer</dd>
<dt>{escape(WHY["waiting_for_parents"].capitalize())}</dt><dd>the model has a GPU and nothing to do until others have
answered</dd>
<dt>No plan fits</dt><dd>a model could run, but needs more GPUs than are free, or others</dd>
<dt>Left free</dt><dd>a model could run there, and that would gain less than loading it costs</dd>
<dt>The end</dt><dd>all models that have work left run already</dd>
<dt>After</dt><dd>SamuLLM, arXiv:2503.16893</dd>
</dl>"""


def page(
    plan: AppPlan | None,
    models: Sequence[str],
    app_metadata: AppFacts,
    *,
    styles: str,
    scripts: Sequence[str],
    data: str,
) -> str:
    """The whole document; ``data`` is what its charts draw, as JSON."""
    heading = app_metadata.name or "An application"
    body = [
        header(heading, list(app_metadata.metadata)),
        section("The answer", _message(plan, models, app_metadata)),
        _charts(plan, models, app_metadata),
        _models(plan, models, app_metadata),
        *(_of_plan(plan, models, app_metadata) if plan is not None else ()),
        section("How to read it", TERMS),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _message(plan: AppPlan | None, models: Sequence[str], app_metadata: AppFacts) -> str:
    told = outcome(plan, models, app_metadata)
    told += sentences(plan, app_metadata) if plan is not None and app_metadata.manifest is None else []
    return f'<ul class="verdicts">{"".join(f"<li><p>{escape(one)}</p></li>" for one in told)}</ul>'


def _charts(plan: AppPlan | None, models: Sequence[str], app_metadata: AppFacts) -> str:
    charts = ""
    if app_metadata.manifest is not None:
        charts += section("What happened", _chart_html("run"), RUN_NOTE)
    if plan is not None:
        title = "As it was planned" if app_metadata.manifest is not None else "What runs where and when"
        charts += section(title, _legend(plan, models) + _chart_html("plan"), PLAN_NOTE)
    return charts


def _chart_html(name: str) -> str:
    return f'<figure><div class="plot chart" id="{name}"></div></figure>'


def _legend(plan: AppPlan, models: Sequence[str]) -> str:
    """Models by colour, then why GPUs idle; what does not happen is not explained."""
    there = {span.what for span in plan.spans}
    items = [f"<li>{_swatch(k)}{escape(name)}</li>" for k, name in enumerate(models)]
    if "load" in there:
        items.append('<li><i class="swatch loads"></i>loading</li>')
    items += [
        f'<li><i class="swatch" style="--c:var(--why-{why})"></i>{escape(words)}</li>'
        for why, words in WHY.items()
        if why in there and why != "load"
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _swatch(model: int) -> str:
    """A model's colour, and its pattern where that colour came before."""
    again = min(model // SERIES, 2)
    return swatch(model).replace('class="swatch"', f'class="swatch again-{again}"') if again else swatch(model)


def _models(plan: AppPlan | None, models: Sequence[str], app_metadata: AppFacts) -> str:
    if app_metadata.manifest is None:
        return ""
    rows = (model_cells(plan, k, name, app_metadata) for k, name in enumerate(models))
    return section("Model by model", _table("Model by model", MODEL_HEADS, rows))


def _of_plan(plan: AppPlan, models: Sequence[str], app_metadata: AppFacts) -> Iterable[str]:
    stages = [row for number, stage in enumerate(plan.stages, 1) for row in _stage(number, stage, models, app_metadata)]
    yield section("Stages", _table("Stages", STAGE_HEADS, stages), STAGE_NOTE)
    yield section("Where the GPUs' time goes", _idle(plan, app_metadata))
    if plan.methods:
        rows = ([one.name.replace("_", " "), took_about(one.makespan), took(one.planned_s), took(one.search_s),
                 str(one.stages), f"{one.gain:.2f}"] for one in plan.methods)  # fmt: skip
        yield section("Planned otherwise", _table("Planned otherwise", METHOD_HEADS, rows), METHOD_NOTE)
    if plan.what_ifs:
        of_s = plan.makespan.value
        changes = ([supposed(w), took_about(w.makespan), difference(w.difference, of_s)] for w in plan.what_ifs)
        yield section("What something else would bring", _table("What if", WHAT_IF_HEADS, changes), WHAT_IF_NOTE)
    if plan.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
        yield section("What is assumed", f'<ul class="notice">{items}</ul>')


def _stage(number: int, stage: AppStage, models: Sequence[str], app_metadata: AppFacts) -> Iterable[list[str]]:
    """A row for each model; what is the stage's own stands in the first."""
    made = switched(stage)
    for k, plan in enumerate(stage.plans):
        own = [str(number), took(stage.start_s), took(stage.end_s)] if k == 0 else ["", "", ""]
        how, duration_s = made.get(plan.model, ("", 0.0))
        places = " ".join(",".join(map(str, replica)) for replica in stage.placement.get(plan.model, ()))
        yield [
            *own, models[plan.model], str(plan.dp), str(plan.tp), str(plan.pp),
            gpus_had(plan, is_mixed=app_metadata.is_mixed), places,
            f"{how} {took(duration_s)}" if how else "", "yes" if stage.ends_by == plan.model else "",
        ]  # fmt: skip


def _idle(plan: AppPlan, app_metadata: AppFacts) -> str:
    count = len(app_metadata.gpus) or 1 + max((span.gpu for span in plan.spans), default=0)
    shares = idle_shares(plan, count)
    works = max(0.0, 1.0 - sum(share for _, share in shares))
    whole_s = count * (plan.stages[-1].end_s if plan.stages else 0.0)
    named = [("models run", works), *((WHY.get(why, why), share) for why, share in shares)]
    rows = ([name, percent(share), took(share * whole_s)] for name, share in named)
    return _table("Where the GPUs' time goes", ("what", "share", "GPU time"), rows)


def _table(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(text)}</td>" for text in rest)}</tr>'
        for first, *rest in rows
    )
    return scrolling(label, f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>")


MOST_MARKS = 60
"""Stages beyond so many are not marked: lines would hide what is between them."""


@dataclass(frozen=True)
class Bar:
    """A stretch of one row.

    Attributes:
        row: From 0.
        start_s: From when.
        end_s: Until when.
        model: By number; -1: none.
        what: As of AppSpan.
        label: What stands in it.
        words: What is told of it.
    """

    row: int
    start_s: float
    end_s: float
    model: int
    what: str
    label: str
    words: str


def figures(plan: AppPlan | None, models: Sequence[str], app_metadata: AppFacts) -> dict[str, Any]:
    """The charts: "plan", where there is one, and "run", where it was run; both by one clock."""
    charts = []
    if plan is not None:
        rows = list(app_metadata.gpus) or [f"GPU {k}" for k in range(1 + max((s.gpu for s in plan.spans), default=0))]
        bars = [_planned(span, models) for span in plan.spans]
        charts.append(("plan", rows, bars, [stage.end_s for stage in plan.stages]))
    if app_metadata.manifest is not None:
        lanes = lanes_of(app_metadata.manifest, app_metadata.gpus)
        spells = spells_of(app_metadata.manifest)
        charts.append(("run", list(lanes.values()), _ran(spells, lanes, models), []))
    end_s = max((bar.end_s for _, _, bars, _ in charts for bar in bars), default=0.0)
    scale, unit = scale_of(end_s)
    return {
        "unit": unit,
        "end": _short(end_s / scale),
        "models": list(models),
        "charts": [_chart_data(*chart, scale) for chart in charts],
    }


def _chart_data(name: str, rows: Sequence[str], bars: Sequence[Bar], marks: Sequence[float], scale: float) -> Any:
    return {
        "id": name,
        "rows": list(rows),
        "bars": [
            [bar.row, _short(bar.start_s / scale), _short(bar.end_s / scale), bar.model, bar.what, bar.label, bar.words]
            for bar in bars
        ],
        "marks": [_short(mark / scale) for mark in marks] if len(marks) <= MOST_MARKS else [],
    }  # fmt: skip


def _planned(span: AppSpan, models: Sequence[str]) -> Bar:
    name = models[span.model] if span.model >= 0 else ""
    label, how = "", ""
    if span.plan is not None:
        label = f"{span.plan.dp}{TIMES}{span.plan.tp}" + (f"{TIMES}{span.plan.pp}" if span.plan.pp > 1 else "")
        how = f", {shape(span.plan)} (dp {TIMES} tp {TIMES} pp: {span.plan.dp}, {span.plan.tp}, {span.plan.pp})"
    says = {"run": f"{name} runs{how}", "load": f"{name} is loaded{how}"}
    words = says.get(span.what) or f"idle: {WHY.get(span.what, span.what)}" + (f" ({name})" if name else "")
    when = f"{took(span.start_s)} to {took(span.end_s)}, {took(span.end_s - span.start_s)}"
    shown = label if span.what == "run" else ""
    return Bar(span.gpu, span.start_s, span.end_s, span.model, span.what, shown, f"{words}\n{when}")


def _ran(spells: Sequence[Spell], lanes: Mapping[Any, str], models: Sequence[str]) -> list[Bar]:
    row_of = {lane: row for row, lane in enumerate(lanes)}
    number = {name: k for k, name in enumerate(models)}
    bars = []
    for spell in spells:
        words = f"{spell.model} {'runs' if spell.what == 'run' else 'is loaded'}"
        if spell.finished == "died":
            words += ", then its engine died"
        when = f"{took(spell.start_s)} to {took(spell.end_s)}, {took(spell.end_s - spell.start_s)}"
        bars.append(
            Bar(
                row_of[spell.lane],
                spell.start_s,
                spell.end_s,
                number.get(spell.model, -1),
                spell.what,
                "died" if spell.finished == "died" else "",
                f"{words}\n{when}",
            )
        )
    return bars


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def write_app_html(
    path: Path | str, plan: AppPlan | None, app_metadata: AppFacts, models: Sequence[str] | None = None
) -> None:
    """A page of a plan, of a run (``about.manifest``), or of both side by side; it fetches nothing.

    The same plan and facts give the same bytes.

    Args:
        path: Of the page.
        plan: The plan; None: engines were given.
        app_metadata: What is said beside it.
        models: Names, where there is no plan.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    plotly = plotly_js()
    names = list(plan.models if plan is not None else models or ())
    text = page(
        plan,
        names,
        app_metadata,
        styles=asset("page.css") + asset("apps/apps.css"),
        scripts=[plotly, asset("look.js"), asset("apps/apps.js")],
        data=json.dumps(figures(plan, names, app_metadata), separators=(",", ":"), allow_nan=False),
    )
    write_whole(path, text.encode())
