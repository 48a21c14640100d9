"""Commands as functions for notebooks: their answers show themselves, become data frames, and draw plots.

from lengthwise import notebook

answer = notebook.simulate(model="llama-3.1-8b", gpu="H100", rate=20)
answer  # the table of the command
answer.to_pandas()  # a row for each number, with its intervals
answer.plot("ttft")
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.schema.errors import MissingExtraError, UnknownNameError
from lengthwise.schema.estimate import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lengthwise.config.scenario import Scenario
    from lengthwise.report import Result
    from lengthwise.report.curves import Figure
    from lengthwise.schema.plan import Plan
    from lengthwise.usecases.capacity import VariantCapacity

Settings = Mapping[str, Any] | None
WIDTH = 140  # columns of a table in a notebook
BARS = 10  # configurations of a search that are drawn


@dataclass(frozen=True)
class Answer:
    """The answer of a command. A notebook shows its table."""

    value: Any  # a list of Result, a list of VariantCapacity, or a Study, with all details
    rows: Sequence[Mapping[str, Any]]  # of the data frames; units are in SI, unknown numbers are None
    shown: Any = field(repr=False)  # the table for rich
    plots: Mapping[str, Callable[[Axes], None]] = field(repr=False)  # by name; the first is the default

    def to_polars(self) -> Any:
        """Return the rows as a polars DataFrame."""
        return import_module("polars").DataFrame(self.rows, infer_schema_length=None)

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame. Raises MissingExtraError without the extra ``pandas``."""
        try:
            return import_module("pandas").DataFrame(self.rows)
        except ImportError as error:
            raise MissingExtraError("a frame of pandas", "pandas") from error

    def plot(self, name: str = "", ax: Axes | None = None) -> Axes:
        """Draw one of ``plots``, by default the first, into new or given axes of matplotlib, and return the axes.

        Raises MissingExtraError without the extra ``notebook``, and UnknownNameError for an unknown name.
        """
        name = name or next(iter(self.plots), "")
        if name not in self.plots:
            raise UnknownNameError("plot", name, self.plots)
        if ax is None:
            try:
                pyplot = import_module("matplotlib.pyplot")
            except ImportError as error:
                raise MissingExtraError("a plot", "notebook") from error
            ax = pyplot.subplots(layout="constrained")[1]
        assert ax is not None
        self.plots[name](ax)
        return ax

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
        console.print(self.shown)
        form = '<pre style="line-height: normal; overflow-x: auto; white-space: pre">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=form)


def simulate(scenario: Path | str | None = None, settings: Settings = None, **short: Any) -> Answer:
    """Simulate every variant of a scenario, as ``lengthwise simulate``.

    Args:
        scenario: Path of a scenario file, its text, or None if ``short`` has a model, a GPU and a rate.
        settings: Settings by key, such as {"deployment.tp": 8, "run.seeds": 5}.
        short: model, gpu, rate, tp and workload, which replace settings of the scenario.

    The frame has a row for each variant and metric. Plots: the CDFs "ttft", "tbt", "tpot" and "jct", "batch",
    "waiting", "kv" and "output" over time, and "shares" of the time. Raises InputError for wrong settings.
    """
    from lengthwise import report
    from lengthwise.report.result_page import figures
    from lengthwise.report.summary_table import METRICS
    from lengthwise.usecases import simulate as usecase

    outcomes = usecase.run(_scenario(scenario, settings, {"rate": None} | short))
    results = [usecase.result_of(outcome) for outcome in outcomes]
    rows = [
        {"variant": r.name, "metric": m.key, "label": m.label, "unit": "s" if m.unit == "ms" else m.unit, **numbers}
        for r in results
        for m in METRICS
        if (numbers := _numbers(m.read(r.summary)))["value"] is not None
    ]
    drawn = {f["id"].partition("-")[2] or f["id"]: f for group in figures(results).values() for f in group}
    plots = {name: partial(_draw_figure, figure=figure, results=results) for name, figure in drawn.items()}
    return Answer(results, rows, report.table(results), plots)


def capacity(
    scenario: Path | str | None = None, settings: Settings = None, *, limits: Settings = None, **short: Any
) -> Answer:
    """Find the largest request rate of every variant within limits, as ``lengthwise capacity``.

    ``limits`` is by metric: {"ttft.p90": "2s"}; the others are as in ``simulate``. The frame has a row for each variant
    with the limited metrics at the lower end of the rate's interval. Plot: "capacity".
    """
    from lengthwise.report.fitted_table import FittedTable
    from lengthwise.report.search_text import metric_name
    from lengthwise.usecases.capacity import capacities

    found = capacities(_scenario(scenario, settings, short, limits))
    rows = [
        {"variant": one.name, **_numbers(one.capacity.rate_rps), "unit": "1/s", "bound_by": one.capacity.binds}
        | ({} if one.at is None else {limit.metric: one.at.value(limit.metric) for limit in one.limits})
        for one in found
    ]
    texts = [
        [one.name, f"{rate.value:.4g}", f"{rate.half_width:.2g}", metric_name(one.capacity.binds)]
        for one in found
        for rate in [one.capacity.rate_rps]
    ]
    shown = FittedTable(["variant", "requests/s", "±", "bound by"], texts)
    return Answer(found, rows, shown, {"capacity": partial(_draw_capacities, found=found)})


def search(
    scenario: Path | str | None = None, settings: Settings = None, *, limits: Settings = None, **short: Any
) -> Answer:
    """Rank deployments, as ``lengthwise search``: ``gpus`` has names, instead of ``gpu``.

    The frame has a row for each configuration, the best first, with its settings, its objective and, if it is excluded,
    the reason. Plots: "ranking" and the Pareto front of cost and each limited latency, by the name of the metric.
    """
    from lengthwise import search as searching
    from lengthwise.report import search_table
    from lengthwise.usecases import search as usecase

    if "gpus" in short:
        short["gpus"] = short["gpus"] if isinstance(short["gpus"], str) else ",".join(short["gpus"])
    made = _scenario(scenario, settings, {"rate": None} | short, limits)
    with searching.threads(None) as workers:
        study = usecase.plan(made, workers)
    rows = [
        {
            "question": plan.name,
            "rank": None if math.isnan(choice.objective.value) else i + 1,
            "tied": i < plan.tied,
            "configuration": choice.name,
            **{key: str(value) for key, value in choice.settings.items()},
            "gpus": choice.gpus,
            "price_per_hour_usd": choice.price_per_hour_usd,
            "objective": plan.objective.name,
            "unit": plan.objective.unit,
            **_numbers(choice.objective),
            "status": choice.status.value,
            "reason": choice.exclusion.reason,
        }
        for plan in study.plans
        for i, choice in enumerate(plan.choices)
    ]
    first = study.plans[0]
    plots: dict[str, Callable[[Axes], None]] = {"ranking": partial(_draw_ranking, plan=first)}
    plots |= {metric: partial(_draw_frontier, plan=first, metric=metric) for metric in first.frontiers}
    return Answer(study, rows, search_table(study), plots)


def _scenario(
    scenario: Path | str | None, settings: Settings, short: Mapping[str, Any], limits: Settings = None
) -> Scenario:
    from lengthwise.usecases import short_options

    if isinstance(scenario, str) and "\n" not in scenario:
        scenario = Path(scenario)
    bounds = short_options.limits([f"{metric}={bound}" for metric, bound in (limits or {}).items()])
    return short_options.scenario_of(scenario, [*bounds, *short_options.assignments(settings)], **short)


def _numbers(estimate: Estimate | None) -> dict[str, float | None]:
    names = ("value", "low", "high", "model_low", "model_high")
    values = {name: math.nan if estimate is None else float(getattr(estimate, name)) for name in names}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _draw_figure(ax: Axes, figure: Figure, results: Sequence[Result]) -> None:
    """Draw a figure of the report: a CDF, a curve over time, or bars of the shares of time."""
    if figure["kind"] == "shares":
        left = [0.0] * len(figure["names"])
        for part in figure["parts"]:
            ax.barh(figure["names"], part["x"], left=left, label=part["label"])
            left = [start + (x or 0.0) for start, x in zip(left, part["x"], strict=True)]
        ax.invert_yaxis()
        ax.set(xlabel="share of time", xlim=(0, 1))
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize="small")
    else:
        for curve in figure["curves"]:
            ax.plot(curve["x"], curve.get("y", figure.get("y")), label=results[curve["variant"]].name)
        for limit in figure.get("limits", ()):
            ax.axvline(limit, linestyle="--", color="gray", label="SLO")
        is_cdf = figure["kind"] == "cdf"
        ax.set(xlabel=figure["unit"] if is_cdf else "s", ylabel="share" if is_cdf else figure["unit"])
        ax.set(title=figure["title"], xscale="log" if figure.get("log") else "linear")
        ax.legend()


def _draw_bars(ax: Axes, names: Sequence[str], estimates: Sequence[Estimate], unit: str) -> None:
    """Draw a bar for each estimate, the first on top, with its interval of sampling and, in gray, of the cost model."""
    errors = [one.half_width if one.has_interval else 0.0 for one in estimates]
    ax.barh(names, [one.value for one in estimates], xerr=errors, capsize=3)
    low, high = [one.model_low for one in estimates], [one.model_high for one in estimates]
    ax.hlines(names, low, high, color="gray", alpha=0.5, linewidth=5)
    ax.invert_yaxis()
    ax.set(xlabel=unit)


def _draw_capacities(ax: Axes, found: Sequence[VariantCapacity]) -> None:
    _draw_bars(ax, [one.name for one in found], [one.capacity.rate_rps for one in found], "requests/s")


def _draw_ranking(ax: Axes, plan: Plan) -> None:
    known = [choice for choice in plan.choices if math.isfinite(choice.objective.value)][:BARS]
    unit = plan.objective.unit
    _draw_bars(ax, [choice.name for choice in known], [choice.objective for choice in known], unit)
    ax.set(title=plan.objective.label)


def _draw_frontier(ax: Axes, plan: Plan, metric: str) -> None:
    from lengthwise.schema.metric_names import metric_of

    trades = sorted(plan.frontiers[metric], key=lambda trade: trade.latency_s)
    ax.plot([trade.latency_s for trade in trades], [trade.cost_usd for trade in trades], marker="o")
    for trade in {trade.choice: trade for trade in trades}.values():
        ax.annotate(trade.choice, (trade.latency_s, trade.cost_usd), fontsize="small", rotation=45)
    ax.set(xlabel=f"{metric_of(metric).label}, s", ylabel="\\$ per 1,000 requests", title="Pareto front", xscale="log")
