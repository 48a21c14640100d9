"""The page's HTML, section by section. Everything that users named is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lengthwise.report._document import document, header, section
from lengthwise.report.search._answers import answers, shared_facts, swaps
from lengthwise.report.search._listing import listing
from lengthwise.schema.plan import Plan, Study

SCATTER_NOTE = (
    "One mark for each load that was simulated; the large ones are operating points. The line is the "
    "frontier: nothing that keeps the other limits is both cheaper and faster. Drag a limit, or change it "
    "beside the figure."
)
MEASURED_NOTE = (
    "Nothing is interpolated: under other limits the best is the best among the simulated loads, and a search "
    "with those limits may find a better one. Few loads lie above what the limits allow, so loosened limits "
    "show little here."
)
COMPARE_NOTE = (
    "At their operating points. Coloured where the intervals do not overlap: the second one better or worse."
)
HEAT_NOTE = (
    "The best objective over all other axes. A cell tells which configuration it is, or why there is none."
)
SHIFTS_NOTE = (
    "The best objective, and who has it, if one limit were another and the others stayed: roughly, from "
    "fewer simulations than the answer's."
)
LISTING_NOTE = "Click a heading to sort. Bold: the limit that binds. Pale: scouted, known roughly."

SCATTER = """<div class="tools"><div class="tabs" id="metrics" role="group" aria-label="Latency metric"></div>
<label>Colour <select id="colour"></select></label>
<label id="one-label" hidden>of <select id="one"></select></label></div>
<div class="explorer"><figure><div class="plot tall" id="scatter"></div></figure>
<aside class="card panel"><h3>Limits</h3><div id="limits"></div>
<button type="button" id="reset">Back to what was asked</button>
<h3 class="later">Best now</h3><div id="now" aria-live="polite"></div></aside></div>
<ul class="legend" id="colours"></ul>
<p class="muted after">{measured}</p>"""

COMPARE = """<div class="tools"><label><i class="swatch" style="--c:var(--series-0)"></i>
<select id="first" aria-label="First configuration"></select></label>
<label><i class="swatch" style="--c:var(--series-1)"></i>
<select id="second" aria-label="Second configuration"></select></label></div>
<div class="halves"><div class="scroll" tabindex="0" role="region" aria-label="Comparison">
<table id="compared"></table></div>
<div><div class="tools"><label>Load curve of <select id="curve"></select></label></div>
<figure><div class="plot" id="curves"></div></figure>
<p class="muted">Lines join simulated loads; the large marks are operating points.</p></div></div>"""

HEAT = """<div class="tools"><label>Across <select id="across"></select></label>
<label>Down <select id="down"></select></label></div>
<div class="scroll" tabindex="0" role="region" aria-label="Heat map"><table id="heat"></table></div>
<p class="muted" id="cell" aria-live="polite"></p>"""

SHIFTS = '<div class="grid" id="shifts"></div><ul class="legend" id="winners"></ul>'

NOTES = """<dl class="notes">
<dt>TTFT</dt><dd>arrival until first token</dd>
<dt>TPOT</dt><dd>time from first to last token over output tokens less one, a request each</dd>
<dt>TBT</dt><dd>time between two tokens (also ITL), tokens of all requests pooled</dd>
<dt>JCT</dt><dd>arrival until last token (also end-to-end latency)</dd>
<dt>Cost</dt><dd>the price of all GPUs for an hour over the requests that arrive in it; a month has 730 hours</dd>
<dt>req/s</dt><dd>the largest rate of requests at which all limits hold</dd>
<dt>Interval</dt><dd>± is the half-width of a {level} interval over seeds of the simulation; it says how well the
simulator's own answer is known, not how well the simulator knows the hardware</dd>
<dt>Tied</dt><dd>its interval overlaps that of the best: more seeds, not this ranking, would tell them apart</dd>
<dt>Scouted</dt><dd>simulated shortly and clearly worse than the best, so its objective is known only roughly</dd>
<dt>Pruned</dt><dd>a bound by closed forms says that it cannot be among the best; not simulated</dd>
<dt>Rejected</dt><dd>cannot run, or breaks a limit at any rate</dd>
<dt>MFU, MBU</dt><dd>FLOPs that the model needs, and bytes that steps must read, over the hardware's peak,
idle time included</dd>
</dl>"""


def page(study: Study, *, styles: str, scripts: Sequence[str], data: str) -> str:
    """The whole document; ``data`` is what its figures draw, as JSON."""
    plans, heading = study.plans, study.name or study.plans[0].name
    level = f"{100 * plans[0].level:g} %"
    axes = any(len(plan.axes) > 1 for plan in plans)
    shifts = any(plan.shifts for plan in plans)
    body = [
        header(heading, _facts(study)),
        answers(study),
        swaps(study),
        _which(plans),
        section("Cost against latency", _interactive(SCATTER.format(measured=MEASURED_NOTE)), SCATTER_NOTE),
        section("Two side by side", _interactive(COMPARE), COMPARE_NOTE),
        section("Two axes at a time", _interactive(HEAT), HEAT_NOTE) if axes else "",
        section("If a limit were another", _interactive(SHIFTS), SHIFTS_NOTE) if shifts else "",
        section("All configurations", _by_plan(plans), LISTING_NOTE),
        section("How to read it", NOTES.format(level=level)),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _facts(study: Study) -> list[str]:
    """Facts that all plans share, what was optimised, how many questions and candidates there are."""
    shared = [str(text) for text in shared_facts(study).values()]
    objectives = list(dict.fromkeys(plan.objective.label for plan in study.plans))
    candidates = sum(plan.spent.candidates for plan in study.plans)
    questions = [f"{len(study.plans)} questions"] if len(study.plans) > 1 else []
    return [*shared, *objectives, *questions, f"{candidates:,} candidates"]


def _which(plans: Sequence[Plan]) -> str:
    """The choice of the plan that all sections below show; hidden where there is no choice."""
    options = "".join(f'<option value="{i}">{escape(plan.name)}</option>' for i, plan in enumerate(plans))
    hidden = "" if len(plans) > 1 else " hidden"
    return f'<p class="which interactive"{hidden}><label>Question <select id="plan">{options}</select></label></p>\n'


def _interactive(html: str) -> str:
    return f'<div class="interactive">{html}</div>'


def _by_plan(plans: Sequence[Plan]) -> str:
    """Every plan's list; the script shows one at a time."""
    return "".join(
        f'<div data-plan="{i}">{_named(plan, plans)}{listing(plan)}</div>' for i, plan in enumerate(plans)
    )


def _named(plan: Plan, plans: Sequence[Plan]) -> str:
    return f'<h3 class="later">{escape(plan.name)}</h3>' if len(plans) > 1 else ""
