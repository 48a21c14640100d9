"""The page's HTML. Everything that users named is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from lengthwise.report._document import document, header, section
from lengthwise.report._marks import SERIES, scrolling, swatch
from lengthwise.report._numbers import percent
from lengthwise.report.apps._facts import AppFacts
from lengthwise.report.apps._outcome import MODEL_HEADS, model_cells, outcome
from lengthwise.report.apps._sentences import sentences
from lengthwise.report.apps._words import (
    WHY,
    difference,
    gpus_had,
    idle_shares,
    supposed,
    switched,
    took,
    took_about,
)
from lengthwise.schema.app import AppPlan, AppStage

STAGE_HEADS = (
    "stage",
    "from",
    "to",
    "model",
    "dp",
    "tp",
    "pp",
    "GPUs",
    "on",
    "made ready",
    "ends as finished",
)
METHOD_HEADS = (
    "method",
    "makespan",
    "on the draws planned with",
    "search",
    "stages",
    "times as long, end to end",
)
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
STAGE_NOTE = (
    "A stage ends when the first of its models has finished. On the first draw of lengths planned with."
)
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
    about: AppFacts,
    *,
    styles: str,
    scripts: Sequence[str],
    data: str,
) -> str:
    """The whole document; ``data`` is what its charts draw, as JSON."""
    heading = about.name or "An application"
    body = [
        header(heading, list(about.facts)),
        section("The answer", _said(plan, models, about)),
        _charts(plan, models, about),
        _models(plan, models, about),
        *(_of_plan(plan, models, about) if plan is not None else ()),
        section("How to read it", TERMS),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _said(plan: AppPlan | None, models: Sequence[str], about: AppFacts) -> str:
    told = outcome(plan, models, about)
    told += sentences(plan, about) if plan is not None and about.manifest is None else []
    return f'<ul class="verdicts">{"".join(f"<li><p>{escape(one)}</p></li>" for one in told)}</ul>'


def _charts(plan: AppPlan | None, models: Sequence[str], about: AppFacts) -> str:
    charts = ""
    if about.manifest is not None:
        charts += section("What happened", _chart("run"), RUN_NOTE)
    if plan is not None:
        title = "As it was planned" if about.manifest is not None else "What runs where and when"
        charts += section(title, _legend(plan, models) + _chart("plan"), PLAN_NOTE)
    return charts


def _chart(name: str) -> str:
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
    return (
        swatch(model).replace('class="swatch"', f'class="swatch again-{again}"') if again else swatch(model)
    )


def _models(plan: AppPlan | None, models: Sequence[str], about: AppFacts) -> str:
    if about.manifest is None:
        return ""
    rows = (model_cells(plan, k, name, about) for k, name in enumerate(models))
    return section("Model by model", _table("Model by model", MODEL_HEADS, rows))


def _of_plan(plan: AppPlan, models: Sequence[str], about: AppFacts) -> Iterable[str]:
    stages = [
        row for number, stage in enumerate(plan.stages, 1) for row in _stage(number, stage, models, about)
    ]
    yield section("Stages", _table("Stages", STAGE_HEADS, stages), STAGE_NOTE)
    yield section("Where the GPUs' time goes", _idle(plan, about))
    if plan.methods:
        rows = ([one.name.replace("_", " "), took_about(one.makespan), took(one.planned_s), took(one.search_s),
                 str(one.stages), f"{one.gain:.2f}"] for one in plan.methods)  # fmt: skip
        yield section("Planned otherwise", _table("Planned otherwise", METHOD_HEADS, rows), METHOD_NOTE)
    if plan.what_ifs:
        of_s = plan.makespan.value
        changes = (
            [supposed(w), took_about(w.makespan), difference(w.difference, of_s)] for w in plan.what_ifs
        )
        yield section(
            "What something else would bring", _table("What if", WHAT_IF_HEADS, changes), WHAT_IF_NOTE
        )
    if plan.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
        yield section("What is assumed", f'<ul class="notice">{items}</ul>')


def _stage(number: int, stage: AppStage, models: Sequence[str], about: AppFacts) -> Iterable[list[str]]:
    """A row for each model; what is the stage's own stands in the first."""
    made = switched(stage)
    for k, plan in enumerate(stage.plans):
        own = [str(number), took(stage.start_s), took(stage.end_s)] if k == 0 else ["", "", ""]
        how, took_s = made.get(plan.model, ("", 0.0))
        places = " ".join(",".join(map(str, replica)) for replica in stage.placement.get(plan.model, ()))
        yield [
            *own, models[plan.model], str(plan.dp), str(plan.tp), str(plan.pp),
            gpus_had(plan, is_mixed=about.is_mixed), places,
            f"{how} {took(took_s)}" if how else "", "yes" if stage.ends_by == plan.model else "",
        ]  # fmt: skip


def _idle(plan: AppPlan, about: AppFacts) -> str:
    count = len(about.gpus) or 1 + max((span.gpu for span in plan.spans), default=0)
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
