"""ExeGPT's evaluation: its models, clusters and tasks, gains over FasterTransformer and other systems, and drift.

Sections ``real`` and ``fits`` read the folder ``shared``; ``live`` needs ``make engine`` and an otherwise idle
machine; each ``systems.MODEL`` takes minutes, and ``gain_over`` combines what is saved of them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
from _harness import RECORDED, json_lines
from _sections import Sections
from _texts import lines

from lengthwise import catalog, schedule
from lengthwise.catalog import weight_bytes
from lengthwise.config.workload import read_trace
from lengthwise.schedule import Assumptions, Controls, Estimator, Strategy, TaskLengths
from lengthwise.schedule.baselines import SYSTEMS, curve
from lengthwise.schedule.length_drift import MOVES, evaluate_deployed, moments, shift_moment
from lengthwise.schedule.search_space import row_of
from lengthwise.schema.errors import ScheduleError
from lengthwise.schema.schedule import ScheduleRow
from lengthwise.schema.workload import estimated_tokens
from lengthwise.statistics import mean_estimate

NODES = {"A40": ("A40", "pcie4-8"), "A100": ("A100-80GB", "dgx-a100")}
"""Cluster to (GPU, node); the paper's A40s are joined by 100 Gb/s, its A100s by 8 x 200 Gb/s a node."""
TASKS = ("s", "t", "g", "c1", "c2")
BOUNDS = ("10 %", "30 %", "70 %", "none")
WAA = (Strategy.WAA_C, Strategy.WAA_M)
AS_THE_PAPER = Assumptions(paper_completions=True, prefill_output_tokens=0)


@dataclass(frozen=True)
class Served:
    model: str
    cluster: str
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.cluster.lower()}"


T5, OPT = Served("t5-11b", "A40", 8), Served("opt-13b", "A40", 4)
GPT39, GPT101 = Served("gpt-3-39b", "A40", 16), Served("gpt-3-101b", "A100", 16)
GPT175, GPT175_A100 = Served("gpt-3-175b", "A40", 32), Served("gpt-3-175b", "A100", 16)
GPT341 = Served("gpt-3-341b", "A40", 48)
SERVED = (T5, OPT, GPT39, GPT101, GPT175, GPT175_A100, GPT341)
SMALL_MID = tuple((served, task) for served in (T5, OPT, GPT39, GPT101) for task in ("s", "t", "c1"))
LARGE = tuple((served, task) for served in (GPT101, GPT175, GPT175_A100, GPT341) for task in ("g", "c1", "c2"))
"""Models and tasks of sections 7.3 and 7.4; section 7.4 does not name the cluster of GPT-3 175B."""
EVERYTHING = tuple((served, task) for served in SERVED for task in TASKS if (served, task) != (T5, "c2"))
"""Every model and task; T5 takes no prompt of 1,024 tokens."""


@lru_cache(maxsize=1)
def _tables(served: Served) -> tuple:
    gpu, node = NODES[served.cluster]
    cluster = schedule.Cluster(catalog.gpu(gpu), catalog.node(node), served.gpus)
    model = catalog.model(served.model)
    return cluster, model, schedule.cluster_tables(model, cluster, schedule.tensor_degrees(model, cluster))


def estimator(served: Served, task: str | schedule.TaskLengths, **options: Any) -> Estimator:
    """Return the estimator of a task, by its letter or as lengths; ``options`` as Estimator takes them."""
    lengths = schedule.TaskLengths.from_preset(f"exegpt-{task}") if isinstance(task, str) else task
    return Estimator(lengths, *_tables(served), **options)


def planner(of: Estimator, strategies: Sequence[Strategy] = tuple(Strategy)) -> schedule.Planner:
    return schedule.Planner(of, tuple(of.setting.tables), strategies)


def chosen(plan: schedule.Planner, bound_s: float, **options: bool) -> schedule.Choice | None:
    """Return the choice under a bound; None: no schedule meets it."""
    try:
        choice = plan.best(bound_s, **options)
    except ScheduleError:
        return None
    assert choice.row.latency_high_s <= bound_s
    return choice


def faster_transformer(of: Estimator) -> schedule.StaticBatches:
    """Return static batches of which each ends with its own longest output, while a bound limits the task's longest."""
    # Every iteration takes the mean over the iterations of the task's longest output, slightly too much.
    static, rows = schedule.static_batches(of), []
    log_cdf = np.log(np.maximum(np.cumsum(of.setting.task.output_pmf)[:-1], 1e-300))
    for row in static.rows:
        longest = (1 - np.exp(row.prefill_batch * log_cdf)).sum()  # mean maximum of a batch
        steps = longest - of.setting.assumptions.prefill_output_tokens
        rows.append(replace(row, throughput_rps=float(row.prefill_batch / (row.prefill_s + row.decode_s * steps))))
    return replace(static, rows=tuple(rows))


def bounds_s(static: schedule.StaticBatches) -> tuple[float, ...]:
    quantiles = static.bounds_s()
    return (*quantiles, math.inf) if quantiles else ()


def summary_of(row: ScheduleRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    numbers = {"rps": row.throughput_rps, "latency_s": row.latency_s, "constrained_latency_s": row.latency_high_s}
    return {"words": row.words} | {name: float(f"{value:.5g}") for name, value in numbers.items()}


Cell = Mapping[str, Any]
Lengths = tuple[np.ndarray, np.ndarray]


def _gains(cells: Iterable[Cell]) -> list[float]:
    """Return the gains of the cells in which some schedule meets the bound, as the bars of the paper's figures."""
    return [cell["gain"] for cell in cells if cell["gain"] > 0]


def _mean_gain(cells: Iterable[Cell]) -> dict[str, Any]:
    return {"value": _mean(_gains(cells)), "unit": "times"}


def _mean(some: Sequence[float]) -> float:
    return fmean(some) if some else math.nan


# Figures 6 and 8: every model and task under four bounds
def figures(_: Path, quick: bool) -> dict[str, Any]:
    """Return a row per model and task, and the mean gains over the paper's sets of them."""
    found = {pair: _cells(*pair) for pair in ([(OPT, "s"), (OPT, "t")] if quick else EVERYTHING)}
    rows = {f"exegpt.figure.{of.name}.{task}": _mean_gain(c) | {"cells": c} for (of, task), c in found.items()}
    if quick:
        return rows
    sets = {"small_mid": SMALL_MID, "large": LARGE, "all": {*SMALL_MID, *LARGE}}
    of_sets = {name: [cell for pair in found if pair in pairs for cell in found[pair]] for name, pairs in sets.items()}
    of_sets["large_rra"] = _rra_alone(of_sets["large"])
    rows |= {f"exegpt.gain_{name}": _gains_of(cells) for name, cells in of_sets.items()}
    return rows | {"exegpt.latency_gain": _latency_gain(found[GPT39, "s"])}


def _rra_alone(cells: Iterable[Cell]) -> list[Cell]:
    """Return cells with the gain of RRA alone, as in section 7.4."""
    every = ((cell, cell["strategies"]["rra"], cell["ft"]) for cell in cells)
    return [{**cell, "gain": own["rps"] / ft["rps"] if own and ft else 0.0} for cell, own, ft in every]


def _latency_gain(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return FasterTransformer's latency without a bound over that of the choice under the tightest (section 7.3)."""
    own, ft = cells[0]["strategies"][cells[0]["won"]], cells[-1]["ft"]
    row = {"value": ft["latency_s"] / own["constrained_latency_s"], "unit": "times", "own": own, "ft": ft}
    return row | {"of_expected": ft["latency_s"] / own["latency_s"], "throughput": own["rps"] / ft["rps"]}


def _gains_of(cells: Sequence[Cell]) -> dict[str, Any]:
    gains, met = _gains(cells), [cell for cell in cells if cell["gain"]]
    row = {"geometric_mean": geometric_mean(gains), "min": min(gains), "max": max(gains)}
    row |= {"mean_without_max": fmean(sorted(gains)[:-1]), "cells_compared": len(gains)}
    to_longest = fmean(cell["gain"] * cell["ft"]["rps"] / cell["ft_task_longest_rps"] for cell in met)
    by_bound = {bound: fmean(_gains(cell for cell in cells if cell["bound"] == bound)) for bound in BOUNDS}
    return _mean_gain(cells) | row | {"if_batches_ran_to_the_longest_output": to_longest, "by_bound": by_bound}


def literal(_: Path, quick: bool) -> dict[str, Any]:
    """Return the mean gain of large models if completions and first tokens count as in the paper's simulator."""
    cells = [cell for pair in LARGE[: 1 if quick else None] for cell in _cells(*pair, assumptions=AS_THE_PAPER)]
    rows = {"exegpt.gain_large_literal": cells, "exegpt.gain_large_literal_rra": _rra_alone(cells)}
    return {name: _gains_of(some) for name, some in rows.items()}


def _cells(served, task: str, **options: Any) -> list[dict[str, Any]]:
    """Return for each bound FasterTransformer's best, each strategy's best, and the gain of the best of them."""
    of = estimator(served, task, **options)
    ft, plan, cells = faster_transformer(of), planner(of), []
    for bound, bound_s in zip(BOUNDS, bounds_s(ft), strict=False):
        choice, other = chosen(plan, bound_s, separately=True), ft.best(bound_s)
        sides = [side for side in (choice.search.sides if choice else ()) if side.best]
        best = {side.strategy: side.best for side in sorted(sides, key=lambda side: side.best.throughput_rps)}
        ft_row = other and {"rps": other.throughput_rps, "batch": other.prefill_batch, "latency_s": other.latency_s}
        cell = {"bound": bound, "bound_s": bound_s, "ft": ft_row}
        cell["ft_task_longest_rps"] = other and schedule.static_batches(of).best(bound_s).throughput_rps
        cell["strategies"] = {strategy.value: summary_of(best.get(strategy.value)) for strategy in Strategy}
        gain = choice.row.throughput_rps / other.throughput_rps if choice and other else 0.0
        cells.append(cell | {"won": choice.row.strategy if choice else None, "gain": gain})
    return cells


# Gains under bounds that are tighter than the paper's
def reasons(_: Path, quick: bool) -> dict[str, Any]:
    """Return gains of large models with the latency of small batches as the bound."""
    rows: dict[str, Any] = {}
    for batch in (4, 8, 16, 32):
        gains = {}
        for served, task in LARGE[:1] if quick else LARGE:
            ft = faster_transformer(of := estimator(served, task))
            bound_s = next(row.latency_s for row in ft.rows if row.prefill_batch == batch)
            choice, ft_rps = chosen(planner(of), bound_s), ft.best(bound_s).throughput_rps
            gains[f"{served.name}, {task}"] = choice.row.throughput_rps / ft_rps if choice else 0.0
        rows[f"exegpt.tight.batch_{batch}"] = _mean_gain({"gain": gain} for gain in gains.values()) | {"gains": gains}
    return rows


# Table 6: the choices for OPT-13B and task S under the paper's bounds
def choices(_: Path, quick: bool) -> dict[str, Any]:
    """Return a row per bound: the choice, and the best of the schedules that the paper's may mean."""
    of = estimator(OPT, "s")
    plan = planner(of)
    ways = {"_as_they_count": AS_THE_PAPER, "_in_lockstep": replace(AS_THE_PAPER, lockstep=True)}
    counted = {"": of} | {name: estimator(OPT, "s", assumptions=way) for name, way in ways.items()}

    def best(of, schedules: list[Controls]) -> dict[str, Any] | None:
        got = of.estimate(schedules)
        index = int(np.argmax(got.throughput_rps))
        return summary_of(row_of(schedules[index], got, index)) if got.feasible.any() else None

    rows = {}
    for bound_s, name, batch, steps, tp, latency_s, rps in RECORDED["exegpt"]["table6"][: 2 if quick else None]:
        choice = chosen(plan, bound_s, separately=True)
        kinds = product(WAA if name == "waa" else (Strategy.RRA,), range(1, OPT.gpus // tp + 1))
        schedules = [Controls(strategy, batch, steps, tp=tp, tp_groups=groups) for strategy, groups in kinds]
        words = f"{name.upper()}, B_E = {batch}{f', N_D = {steps}' if name == 'rra' else ''}, TP {tp}"
        row = {"value": choice.row.throughput_rps, "unit": "requests/s", "choice": summary_of(choice.row)}
        row |= {"paper": {"words": words, "latency_s": latency_s, "rps": rps}}
        row |= {f"paper_schedule{name}": best(one, schedules) for name, one in counted.items()}
        rows[f"exegpt.table6.{'none' if math.isinf(bound_s) else f'{bound_s:g}s'}"] = row
    rates = [row["value"] for row in rows.values()]
    assert rates == sorted(rates), "a looser bound never serves less"
    return rows


# Figure 10: recorded lengths; planned on a tenth of each trace, evaluated on the other nine tenths
PLANNED_SHARE, SPLITS = 0.1, 3
MAX_TOKENS = 2048
"""Context of both models. Requests are left out if their prompt or their output exceeds its share of it."""


def real(shared: Path, quick: bool) -> dict[str, Any]:
    """Return a row per model and trace, and the mean gain with its range over splits."""
    traces = {}
    for name, (path, max_output) in RECORDED["exegpt"]["traces"].items():
        prompt, output = read_lengths(shared / "data" / path)
        good = (prompt >= 1) & (output >= 1) & (prompt <= MAX_TOKENS - max_output) & (output <= max_output)
        traces[name] = prompt[good], output[good]
    pairs = [(served, name) for served in ([OPT] if quick else [OPT, GPT39]) for name in traces]
    seeds = range(1 if quick else SPLITS)
    splits = [{pair: _unseen_cells(*pair, traces[pair[1]], seed) for pair in pairs} for seed in seeds]
    rows = {}
    for (served, name), cells in splits[0].items():
        prompt, (mean, sd, _) = traces[name][0], moments(TaskLengths.from_samples(*traces[name], name).output_pmf)
        lengths = {"requests": len(prompt), "prompt_mean": float(prompt.mean()), "output_mean": mean, "output_sd": sd}
        rows[f"exegpt.real.{served.name}.{name}"] = _mean_gain(cells) | {"lengths": lengths, "cells": cells}
    split_cells = [list(chain(*split.values())) for split in splits]
    every, means = list(chain(*split_cells)), [fmean(_gains(cells)) for cells in split_cells]
    late = sum(not cell["is_satisfied"] for cell in every if cell["gain"])
    ft_late = sum(not cell["ft"]["is_satisfied"] for cell in every)
    about = {"ci": (min(means), max(means)), "cells": len(every)}
    rows["exegpt.gain_real"] = _mean_gain(every) | about | {"broke_its_bound": late, "ft_broke_its_bound": ft_late}
    return rows


def _unseen_cells(served, name: str, lengths: Lengths, seed: int) -> list[dict[str, Any]]:
    """Return a cell per bound: the choice and FasterTransformer's batch of the tenth on the other lengths."""
    prompt, output = lengths
    order = np.random.default_rng(seed).permutation(len(prompt))
    parts = np.split(order, [max(int(PLANNED_SHARE * len(order)), 1)])
    known, unseen = (estimator(served, TaskLengths.from_samples(prompt[part], output[part], name)) for part in parts)
    plan, ft_known, ft = planner(known), faster_transformer(known), faster_transformer(unseen).rows
    cells = []
    for bound, bound_s in zip(BOUNDS, bounds_s(ft_known), strict=False):
        best = ft_known.best(bound_s)  # None: even a batch of one takes longer for an output of maximum length
        batch = best.prefill_batch if best else 1
        static = next((row for row in ft if row.prefill_batch >= batch), ft[-1])
        own = _on_unseen(chosen(plan, bound_s), unseen, bound_s)
        of_ft = {"rps": static.throughput_rps, "batch": batch, "is_satisfied": static.latency_s <= bound_s}
        cell = {"bound": bound, "bound_s": bound_s, "gain": own["rps"] / static.throughput_rps, "ft": of_ft}
        cells.append(own | cell)
    return cells


def _on_unseen(choice, unseen, bound_s: float) -> dict[str, Any]:
    """Evaluate a choice on other lengths, with its prefill batch reduced until it fits in memory."""
    row = choice.row if choice else None
    while row:
        got, latency_s = evaluate_deployed(unseen, row, worst_case=True)
        if math.isfinite(latency_s):
            return {"won": row.strategy, "rps": got.throughput_rps, "is_satisfied": latency_s <= bound_s}
        row = replace(row, prefill_batch=row.prefill_batch - 1) if row.prefill_batch > 1 else None
    return {"won": None, "rps": 0.0, "is_satisfied": True}


def read_lengths(path: Path, prompt: Sequence[str] = ("instruction", "input"), output: str = "output") -> Lengths:
    """Read a trace of token counts, or texts with these keys, whose token counts are estimated."""
    if path.parent.name == "traces":
        trace = read_trace(path)
        return trace.prompt_tokens, trace.output_tokens
    rows = [("\n".join(row.get(key, "") for key in prompt), row[output]) for row in lines(path)]
    return tuple(np.array([list(map(estimated_tokens, row)) for row in rows], np.int64).T)


# Figure 11: task T's outputs drift, OPT-13B's schedule stays
def drift(_: Path, quick: bool) -> dict[str, Any]:
    """Return a row per strategy: every drift with the fixed and the new schedule, and the margins of both SLAs."""
    # The second SLA is for an output as long as the quantile before the drift. Without a bound only the mean drifts.
    of = estimator(OPT, "t")
    length = Assumptions(output_tokens=of.setting.task.output_quantile(of.setting.assumptions.level))
    bounds = list(zip(BOUNDS, bounds_s(faster_transformer(of)), strict=True))[1:]
    rows = {}
    for name, strategies in {"waa": WAA, "rra": (Strategy.RRA,)}.items():
        plan = planner(of, strategies)
        bound, bound_s, choice = next((*one, found) for one in bounds if (found := chosen(plan, one[1])))
        before, moves = choice.row, []
        planners = (plan, planner(of.replace(assumptions=length), strategies))
        drifts = [schedule.drift(each, choice, MOVES[:2] if quick else MOVES) for each in planners]
        for row, fixed in zip(*drifts, strict=True):
            rates = {"fixed_schedule_rps": row.retained, "replanned_rps": row.replanned}
            latencies = {"latency": row.retained_latency_s, "fixed_latency": fixed.retained_latency_s}
            moves.append(
                {"changed": row.changed, "change": row.change, "margin": row.margin, "fixed_margin": fixed.margin}
                | {key: seconds / before.latency_high_s for key, seconds in latencies.items()}
                | {key: one.throughput_rps / before.throughput_rps if one else math.nan for key, one in rates.items()}
            )
        longer = [move["latency"] - 1 for move in moves if (move["changed"], move["change"]) == ("mean", 0.15)]
        value = {"value": _mean(longer), "unit": "relative", "better": "lower", "target": 0.13}  # the paper's margin
        details = {"bound": bound, "bound_s": bound_s, "schedule": before.words, "moves": moves}
        rows[f"exegpt.drift.{name}"] = value | details
        rows[f"exegpt.drift_without_bound.{name}"] = _lost_without_bound(of, strategies)
    return rows


def _lost_without_bound(of: Estimator, strategies: Sequence[Strategy]) -> dict[str, Any]:
    """Return the largest loss of the fixed schedule, its prefill batch reduced to fit, where the mean drifts."""
    choice, task, lost = chosen(planner(of, strategies), math.inf), of.setting.task, {}
    for change in (change for what, change in MOVES if what == "mean"):
        pmf = shift_moment(task.output_pmf, "mean", change, of.setting.model.max_model_len - task.max_prompt_tokens)
        other = of.replace(task=TaskLengths(task.prompt_pmf, pmf))
        best_rps = chosen(planner(other, strategies), math.inf).row.throughput_rps
        lost[f"{100 * change:+g} %"] = 1 - _on_unseen(choice, other, math.inf)["rps"] / best_rps
    return {"value": max(lost.values()), "lost": lost}


# Figure 7 and today's engines: every other system in its best configuration under the same bounds
RESULTS = Path(__file__).parent / "results" / "exegpt.json"
SCENARIOS = {OPT: TASKS, T5: ("s", "t", "c1"), GPT39: ("s", "t", "c1"), GPT101: ("s", "t", "c1")}
SCENARIOS[GPT175_A100] = ("g", "c1", "c2")


def systems(_: Path, quick: bool, model: str) -> dict[str, Any]:
    """Return a row per task of a model: each system's best under each bound, the mean gain over vLLM v1."""
    served, tasks = next((one, tasks) for one, tasks in SCENARIOS.items() if one.name == model)
    return {f"exegpt.systems.{model}.{task}": _scenario(served, task, quick) for task in tasks[: 1 if quick else None]}


def _scenario(served, task: str, quick: bool) -> dict[str, Any]:
    of = estimator(served, task)
    setting, ft, plans = of.setting, faster_transformer(of), {1: planner(of)}
    for replicas in range(2, setting.cluster.gpus + 1):
        cluster = replace(setting.cluster, gpus=setting.cluster.gpus // replicas)
        fits = weight_bytes(setting.model) <= cluster.gpus * setting.available_bytes
        if not setting.cluster.gpus % replicas and fits:
            tables = {tp: one for tp, one in setting.tables.items() if tp <= cluster.gpus}
            plans[replicas] = planner(Estimator(setting.task, cluster, setting.model, tables, setting.assumptions))
    curves = {name: curve(of, name, requests=150 if quick else 800, seed=11) for name in SYSTEMS}
    tp, cells = ft.rows[0].tp, []
    cut = (tp, setting.cluster.gpus // tp)
    for bound, bound_s in zip(BOUNDS, bounds_s(ft), strict=True):
        some = {replicas: choice for replicas, plan in plans.items() if (choice := chosen(plan, bound_s))}
        replicas = max(some, key=lambda n: n * some[n].row.throughput_rps, default=None)
        best = replicas and summary_of(some[replicas].row)
        cell = {"bound": bound, "bound_s": bound_s, "exegpt": summary_of(some[1].row) if 1 in some else None}
        cell["exegpt_in_replicas"] = best and best | {"rps": replicas * best["rps"], "replicas": replicas}
        cell["systems"] = {name: _best_of(found, bound_s) for name, found in curves.items()}
        cell["as_cut_for_ft"] = {name: _best_of(found, bound_s, cut) for name, found in curves.items()}
        cells.append(cell)
    return {"value": _mean(_ratios(cells, "vllm-v1")), "unit": "times", "cells": cells}


def _best_of(found, bound_s: float, cut: tuple[int, int] | None = None) -> dict[str, Any] | None:
    """Return a system's best under a bound, of one division (TP, stages) of the cluster or of all."""
    pairs = zip(found.rows, found.intervals_rps, strict=True)
    good = [(row, ends) for row, ends in pairs if row.throughput_rps > 0 and row.latency_high_s <= bound_s]
    if cut:
        good = [(row, ends) for row, ends in good if (row.tp, row.stages, row.replicas) == (*cut, 1)]
    if not good:
        return None
    best, ends = max(good, key=lambda pair: pair[0].throughput_rps)
    return summary_of(best) | {"rps_ci": list(ends)}


def gains_over(_: Path, _quick: bool) -> dict[str, Any]:
    """Return the mean gain over each system, of the means of all saved scenarios, whose ratios depend on each other."""
    rows, gains = json_lines(RESULTS), {}
    every = [row["details"]["cells"] for row in rows if row["name"].startswith("exegpt.systems.")]
    for system in SYSTEMS:
        found = [cells for cells in every if all(system in cell["systems"] for cell in cells)]
        scenarios = [some for cells in found if (some := _ratios(cells, system))]
        if not scenarios:
            continue
        cells, ratios, mean = list(chain(*found)), list(chain(*scenarios)), mean_estimate(list(map(fmean, scenarios)))
        by_bound = {bound: _ratios((cell for cell in cells if cell["bound"] == bound), system) for bound in BOUNDS}
        gain = {"value": mean.value, "unit": "times", "ci": (mean.low, mean.high), "ahead": sum(r > 1 for r in ratios)}
        gain |= {"both_meet": len(ratios), "by_bound": {bound: _mean(some) for bound, some in by_bound.items()}}
        gain["in_replicas"] = _mean(_ratios(cells, system, own="exegpt_in_replicas"))
        gain["as_cut_for_ft"] = _mean(_ratios(cells, system, other="as_cut_for_ft"))
        gains[f"exegpt.gain_over_{system.replace('-', '_')}"] = gain
    return gains


def _ratios(cells: Iterable[Cell], system: str, own: str = "exegpt", other: str = "systems") -> list[float]:
    """Return the best schedule's throughput over a system's, where both meet the bound."""
    return [cell[own]["rps"] / rival["rps"] for cell in cells if (rival := cell[other].get(system)) and cell[own]]


SECTIONS = Sections("exegpt", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
