"""ExeGPT's schedules: their search (Table 5), estimates and bounds in the event engine, stage times (Table 7)."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exegpt as ex
import numpy as np
from _harness import RECORDED, machine

from lengthwise import schedule
from lengthwise.schedule import Assumptions, Controls, Estimator, Perf, Strategy, Variable
from lengthwise.schedule.controls import CODES
from lengthwise.schedule.optimizer import evaluate_grid

sys.path.append(str(Path(__file__).parents[1] / "tests" / "schedule"))  # runs of schedules are those of the tests
from monotonicity import non_monotone
from simulated_schedules import in_window, independent, prefill_stages_s, simulated, window

ALL = tuple(Strategy)


def search(_: Path, quick: bool) -> dict[str, Any]:
    """Return the slowest search and the largest share of schedules estimated; every bound has a new planner."""
    first = ex.estimator(ex.OPT, "s")
    ex.chosen(ex.planner(first), ex.bounds_s(ex.faster_transformer(first))[0])  # loads the compiled code
    choices = []
    for served, task in [(ex.OPT, "s"), (ex.OPT, "t")] if quick else ex.EVERYTHING:
        bounds_s = ex.bounds_s(ex.faster_transformer(ex.estimator(served, task)))
        for bound, bound_s in zip(ex.BOUNDS, bounds_s, strict=False):
            start = time.process_time()
            plan = ex.planner(ex.estimator(served, task))
            choice = ex.chosen(plan, bound_s)
            about = {"model": served.name, "task": task, "bound": bound, "search_s": time.process_time() - start}
            assert choice is None or choice.search.evaluated <= choice.search.points
            points, evaluated = (sum(getattr(one, key) for one in plan.spaces) for key in ("size", "evaluated"))
            choices.append(about | {"points": points, "points_share": evaluated / points})
    slowest, largest = (max(choice[name] for choice in choices) for name in ("search_s", "points_share"))
    searches = {"value": slowest, "choices": choices, "machine": machine()}
    return {"exegpt.search_s_max": searches, "exegpt.points_share_max": largest}


# Regret: choices against every schedule there is, at many bounds
QUESTIONS = [(ex.OPT, task, ALL) for task in ("s", "t", "g", "c1")] + [(ex.T5, "s", ALL)]
QUESTIONS += [(ex.GPT39, "t", ex.WAA), (ex.GPT101, "t", ex.WAA), (ex.GPT101, "c1", ex.WAA), (ex.GPT39, "s", ALL)]
BETWEEN = 12
"""Bounds from the least latency to that of the highest throughput, in addition to FasterTransformer's and none."""


def regret(_: Path, quick: bool) -> dict[str, Any]:
    """Return the largest regret over questions and bounds."""
    some = QUESTIONS[:1] if quick else QUESTIONS
    found = {f"{served.name}, {task}": _regrets(served, task, strategies) for served, task, strategies in some}
    return {"exegpt.regret_max": {"value": max(of["regret_max"] for of in found.values()), "questions": found}}


def _regrets(served, task: str, strategies: tuple[Strategy, ...]) -> dict[str, Any]:
    """Return the largest share of the best throughput that choices fall short of, over all bounds."""
    of, start = ex.estimator(served, task), time.process_time()
    spaces = [space for space in ex.planner(of, strategies).spaces if space.size]
    grids = [evaluate_grid(space.perf_uncached, space.variables) for space in spaces]
    latency_s = np.concatenate([grid.latency_s.ravel() for grid in grids])
    rps = np.concatenate([grid.throughput_rps.ravel() for grid in grids])
    minutes = (time.process_time() - start) / 60
    latency_s, rps = latency_s[np.isfinite(latency_s)], rps[np.isfinite(latency_s)]
    between = np.geomspace(1.001 * latency_s.min(), latency_s[np.argmax(rps)], BETWEEN)
    regrets, won = [], []
    for bound_s in (*between, *ex.bounds_s(ex.faster_transformer(of))):
        best_rps = float(rps[latency_s <= bound_s].max(initial=0.0))
        if not best_rps:
            continue
        choice = ex.chosen(ex.planner(of, strategies), bound_s)
        own_rps = choice.row.throughput_rps if choice else 0.0
        assert own_rps <= best_rps * (1 + 1e-9), "no schedule is better than the best of all"
        regrets.append(max(1 - own_rps / best_rps, 0.0))
        won.append(choice and choice.row.strategy)
    counts = {strategy.value: won.count(strategy.value) for strategy in strategies}
    about = {"strategies": list(counts), "points": sum(space.size for space in spaces), "exhaustive_minutes": minutes}
    return about | {"bounds": len(regrets), "regret_max": max(regrets), "chosen": counts}


# Table 5: the share of points that break monotonicity, one control variable at a time
TOLERANCES, HEADLINE = (0.02, 0.05, 0.10), 0.05
MAX_VALUES = 40
ONE_SPLIT, FEW_PARTS = "B_E, one split", "B_m, at most the decode stages"
ASSUMED = ("rra B_E", "rra N_D", f"waa {ONE_SPLIT}")  # variables that the search assumes to be monotone
PAPER_COLUMNS = ("rra B_E", "rra N_D", "waa B_E", "waa TP", "waa B_m")


def monotone(_: Path, quick: bool) -> dict[str, Any]:
    """Return the share at 5 % over Table 5's variables, the larger of latency's and throughput's, and the table."""
    rows = [row for task in ("s", "t") for row in _monotonicity_of(ex.OPT if quick else ex.GPT39, task)]

    def shares(columns: tuple[str, ...]) -> dict[str, float]:
        some = [r for r in rows if r["tolerance"] == HEADLINE and f"{r['strategy'][:3]} {r['variable']}" in columns]
        points = sum(row["points"] for row in some)
        return {kind: sum(row[kind] * row["points"] for row in some) / points for kind in ("latency", "throughput")}

    in_paper = shares(PAPER_COLUMNS)
    details = {"assumed_by_the_search": shares(ASSUMED), "rows": rows, "paper": RECORDED["exegpt"]["table5"]}
    value = {"value": max(in_paper.values()), "unit": "share", "better": "lower"}
    few = {f"{kind}_if_rising": share for kind, share in shares((f"waa {FEW_PARTS}, rising",)).items()}
    few |= shares((f"waa {FEW_PARTS}",))
    few |= {"value": few["latency"]}
    return {"exegpt.nonmonotone_micro_batches": few, "exegpt.nonmonotone_share": value | in_paper | details}


def _monotonicity_of(served, task: str) -> list[dict[str, Any]]:
    """Return a row per strategy, degree, variable and tolerance; latency is the worst case, which the search limits."""
    of = ex.estimator(served, task)
    bound_s, plan = ex.bounds_s(ex.faster_transformer(of))[2], ex.planner(of)
    scale_rps = ex.chosen(plan, bound_s).row.throughput_rps
    rows = []
    for space in (space for space in plan.spaces if space.size):
        boxes = [_box(of, space)]
        if space.strategy is not Strategy.RRA:  # as the search has it: batches of one split, one run after another
            batches = Variable(ONE_SPLIT, _thinned(space.variables[0].values))
            boxes.append(((batches, space.variables[1]), space.perf_uncached))
            boxes += [_few_parts(of, space, *boxes[0], rising=rising) for rising in (False, True)]
        for variables, perf in boxes:
            found = non_monotone(perf, variables, TOLERANCES, latency_scale_s=bound_s, throughput_scale_rps=scale_rps)
            rows += [{"task": task, "strategy": space.strategy.value, "tp": space.tp} | vars(one) for one in found]
    return rows


def _few_parts(of, space, variables, perf, *, rising: bool):
    """Return the same box with at most as many decode micro-batches as decode stages, for B_m alone."""
    batch, parts, groups = variables
    others = [Variable(one.name, one.values, rising=None) for one in (batch, groups)]
    named = Variable(f"{FEW_PARTS}{', rising' * rising}", parts.values, rising=rising)

    def limited(points: np.ndarray) -> Perf:
        got, columns = perf(points), _columns(space, points)
        decode_gpus = of.setting.cluster.gpus - of.estimate(columns).prefill_gpus
        stages = decode_gpus - np.minimum(columns.tp_groups, decode_gpus // space.tp) * (space.tp - 1)
        return Perf(np.where(columns.micro_batches <= stages, got.latency_s, np.inf), got.throughput_rps)

    return (others[0], named, others[1]), limited


def _box(of, space):
    """Return the control variables as the paper sweeps them, and their performance; WAA's are not divided into runs."""
    rra = space.strategy is Strategy.RRA
    largest = [one.values[-1] for one in space.variables[:-1]]
    ends = space.columns(np.array([(*largest, other) for other in space.variables[-1].values]))
    max_batch = space.variables[0].values[-1] if rra else int(ends.prefill_batch.max())
    second = space.variables[1].values if rra else tuple(np.unique(ends.micro_batches).tolist())
    variables = (
        Variable("B_E", _thinned(tuple(range(1, max_batch + 1)))),
        Variable("N_D" if rra else "B_m", _thinned(second), rising=False),
        Variable("TP", tuple(np.unique(ends.tp_groups).tolist()), rising=False),
    )

    def perf(points: np.ndarray) -> Perf:
        got = of.estimate(_columns(space, points))
        return Perf(got.constrained_latency_s(worst_case=True), got.throughput_rps)

    return variables, perf


def _columns(space, points: np.ndarray) -> schedule.ControlColumns:
    """Return points (B_E, N_D or B_m, groups) of a box as controls."""
    ones, (batch, other, groups) = np.ones(len(points), dtype=np.int64), points.T
    steps, micro_batches = (other, 0 * ones) if space.strategy is Strategy.RRA else (ones, other)
    code = CODES.index(space.strategy) * ones
    return schedule.ControlColumns(code, batch, steps, micro_batches, space.tp * ones, groups)


def _thinned(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return all values, or MAX_VALUES of them at most, close together where they are small."""
    if len(values) <= MAX_VALUES:
        return values
    places = np.unique(np.rint(np.geomspace(1, len(values), MAX_VALUES)).astype(int) - 1)
    return tuple(values[place] for place in places)


def _interval(values: np.ndarray) -> tuple[float, float]:
    return tuple(float(end) for end in np.quantile(values, [0.025, 0.975]))


# Errors of the estimates of random schedules
AT_RANDOM = tuple((ex.OPT, task) for task in ex.TASKS)
AT_RANDOM += ((ex.T5, "s"), (ex.GPT39, "s"), (ex.GPT39, "t"), (ex.GPT101, "c1"))
PER_STRATEGY, REQUESTS = 12, 60_000


def engine(_: Path, quick: bool) -> dict[str, Any]:
    """Return P95 over the relative errors of throughput and latency of random schedules, which are resampled."""
    found = []
    for seed, strategies in ((7, (Strategy.RRA,)), (8, ex.WAA)):
        rng = np.random.default_rng(seed)
        for served, task in AT_RANDOM[:1] if quick else AT_RANDOM:
            if strategies != ex.WAA or served != ex.T5:  # the engine does not simulate WAA of an encoder-decoder
                found += _random_schedules(served, task, strategies, rng, 2 if quick else PER_STRATEGY)
    both, rng = np.abs([[one["rps_error"], one["latency_error"]] for one in found]), np.random.default_rng(0)
    again = [np.quantile(both[rng.integers(len(both), size=len(both))], 0.95) for _ in range(2000)]
    throughput_p95, latency_p95 = np.quantile(both, 0.95, axis=0).tolist()
    details = {"schedules": len(both), "throughput_p95": throughput_p95, "latency_p95": latency_p95}
    details["worst"] = [found[i] for i in np.argsort(-both.max(axis=1))[:20]]
    return {"exegpt.estimator_error_p95": {"value": float(np.quantile(both, 0.95)), "ci": _interval(again)} | details}


def _random_schedules(served, task: str, strategies, rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Draw schedules that fit in memory: batch and phase or split on a logarithmic scale, any degree and groups."""
    of, found = ex.estimator(served, task), []
    spaces = [space for space in ex.planner(of, strategies).spaces if space.size]
    while spaces and len(found) < count:
        space = spaces[rng.integers(len(spaces))]
        *logarithmic, last = (np.array(one.values) for one in space.variables)
        point = [int(values[int(len(values) ** rng.random()) - 1]) for values in logarithmic] + [int(rng.choice(last))]
        if np.isfinite(space.perf_uncached(np.array([point], dtype=np.int64)).latency_s[0]):
            lengths = independent(of.setting.task, REQUESTS, len(found))
            found.append({"of": f"{served.name}, {task}"} | compared(of, space.controls(tuple(point)), lengths))
    return found


def compared(of: Estimator, controls: Controls, lengths: ex.Lengths) -> dict[str, Any]:
    """Return the relative errors of one schedule; its latency is that of outputs near the quantile."""
    expected, setting = of.estimate([controls]), of.setting
    output, duration_s, rps = in_window(of, controls, lengths)
    quantile, rra = setting.task.output_quantile(setting.assumptions.level), controls.strategy is Strategy.RRA
    long = np.abs(output - quantile) <= max(0.01 * quantile, 0 if rra else 2)
    if rra:  # only outputs that need as many phases
        phases = -(-(output - setting.assumptions.prefill_output_tokens) // controls.decode_steps)
        long &= phases == -(-setting.iterations // controls.decode_steps)
    assert long.sum() > 5
    rps_error = float(expected.throughput_rps[0] / rps) - 1
    latency_error = float(expected.latency_s[0] / duration_s[long].mean()) - 1
    late = float((duration_s[long] > expected.latency_high_s[0]).mean())
    return {"controls": _words(controls), "rps_error": rps_error, "latency_error": latency_error, "late": late}


def _words(controls: Controls) -> str:
    steps = f", N_D = {controls.decode_steps}" if controls.strategy is Strategy.RRA else ""
    name = controls.strategy.value.upper()
    return f"{name}, B_E = {controls.prefill_batch}{steps}, {controls.tp_groups} x TP {controls.tp}"


# Bounds: whether choices meet them, with and without dynamic adjustment
BOUND_REQUESTS, LATE, UNLIKELY = 40_000, 0.01, 0.001
"""A bound limits the latency at which the work's range is 99 %, so that 1 % may be late."""


def bounds(_: Path, quick: bool) -> dict[str, Any]:
    """Return the share of outputs near the quantile that took longer than the bound, over all choices."""
    from scipy.stats import binom

    found = [one for pair in ([(ex.OPT, "s")] if quick else ex.EVERYTHING) for one in _bounds_of(*pair)]
    late, count = (np.array([one[name] for one in found]) for name in ("late", "requests"))
    again = np.random.default_rng(0).integers(len(found), size=(2000, len(found)))
    odd = [one for one in found if binom.sf(one["late"] - 1, one["requests"], LATE) < UNLIKELY]
    unit, ci = "share of outputs of the quantile", _interval(late[again].sum(axis=1) / count[again].sum(axis=1))
    value = {"value": float(late.sum() / count.sum()), "unit": unit, "better": "lower", "target": LATE, "ci": ci}
    details = {"choices": len(found), "outputs": int(count.sum()), "broke_more_than_chance_explains": odd}
    return {"exegpt.bound_broken_share": value | details}


def _bounds_of(served, task: str) -> Iterator[dict[str, Any]]:
    """Simulate each strategy's choice under each finite bound; count late outputs within 0.5 % below the quantile."""
    bounds_s = ex.bounds_s(ex.faster_transformer(ex.estimator(served, task)))[:-1]
    for threshold in (None, 0.05):
        of = ex.estimator(served, task, assumptions=Assumptions(threshold=threshold))
        for strategies in ((Strategy.RRA,), *((ex.WAA,) if served != ex.T5 else ())):
            plan = ex.planner(of, strategies)
            for bound, bound_s in zip(ex.BOUNDS, bounds_s, strict=False):
                choice = ex.chosen(plan, bound_s)
                if choice is None:
                    continue
                lengths = independent(of.setting.task, BOUND_REQUESTS, 3)
                output, duration_s, _ = in_window(of, choice.controls, lengths, threshold)
                quantile = of.setting.bound_tokens
                duration_s = duration_s[(output <= quantile) & (output >= 0.995 * quantile)]
                about = {"of": f"{served.name}, {task}, bound {bound}, {choice.row.words}", "threshold": threshold}
                yield about | {"requests": len(duration_s), "late": int((duration_s > bound_s).sum())}


# Table 7: stage times of OPT-13B and task S, with and without dynamic adjustment
STAGE_REQUESTS, LEVEL = 40_000, 0.99
SCHEDULES = {  # of the paper, and such that decode on one stage, so that a step is a stage's time
    "paper_11.5s": ("the paper's at 11.5 s", Controls(Strategy.RRA, 52, 13, tp=4, tp_groups=1)),
    "paper_none": ("the paper's, no bound", Controls(Strategy.RRA, 49, 7, tp=4, tp_groups=1)),
    "paper_3.1s": ("the paper's at 3.1 s", Controls(Strategy.WAA_C, 4, 1, tp=2, tp_groups=2)),
    "paper_5.9s": ("the paper's at 5.9 s", Controls(Strategy.WAA_C, 10, 1, tp=2, tp_groups=2)),
}


def variance(_: Path, quick: bool) -> dict[str, Any]:
    """Return a row per schedule and threshold of the dynamic adjustment: its value is the range of a prefill."""
    of, schedules = ex.estimator(ex.OPT, "s"), dict(SCHEDULES)
    if not quick:
        sides = ex.chosen(ex.planner(of, [Strategy.RRA]), float("inf"), separately=True).search.sides
        row = next(side.best for side in sides if side.tp == ex.OPT.gpus)
        rra = Controls(Strategy.RRA, row.prefill_batch, row.decode_steps, tp=row.tp, tp_groups=row.tp_groups)
        waa = ex.chosen(ex.planner(of, ex.WAA), ex.bounds_s(ex.faster_transformer(of))[0]).controls
        schedules |= {"ours_none": ("ours at TP 4, no bound", rra), "ours_10": ("ours under the 10 % bound", waa)}
    rows = {}
    for name, (title, controls) in schedules.items():
        for threshold in (None, 0.1, 0.05):
            label = "as_it_comes" if threshold is None else f"within_{100 * threshold:.0f}_percent"
            row = _stage_times(of, controls, threshold, STAGE_REQUESTS // 8 if quick else STAGE_REQUESTS)
            rows[f"exegpt.variance.{name}.{label}"] = row | {"schedule": f"{title}: {_words(controls)}"}
    return rows


def _stage_times(of: Estimator, controls: Controls, threshold: float | None, count: int) -> dict[str, Any]:
    """Return mean and 99 % range of prefills and of decode iterations, throughput and P99 latency."""
    lengths = independent(of.setting.task, count, 3)
    deployment, records = simulated(of, controls, lengths, threshold, max_log_steps=10**7)
    requests, steps = records.requests, records.steps
    from_s, to_s = window(np.sort(requests.scheduled_s))
    served = (requests.scheduled_s >= from_s) & (requests.scheduled_s < to_s)
    inside = (steps.start_s >= from_s) & (steps.start_s < to_s)
    if controls.strategy is Strategy.RRA:
        duration_s, prefills = (steps.end_s - steps.start_s)[inside], steps.prefill_seqs[inside] > 0
        assert 0 < prefills.sum() < len(prefills)
        prefill, decode = _spread(duration_s[prefills]), _spread(duration_s[~prefills])
        decode["range_at_its_place"] = _range(_over_mean_at_place(duration_s, prefills))
    else:
        assert deployment.decode is not None
        assert deployment.decode.parallel.pp == 1
        formed_s, (_, slowest_s) = np.unique(requests.scheduled_s), prefill_stages_s(requests, deployment.cost)
        prefill = _spread(slowest_s[(formed_s >= from_s) & (formed_s < to_s)])
        decode = _spread((steps.end_s - steps.start_s)[inside & (steps.replica == deployment.parallel.replicas)])
    value = {"value": prefill["range"], "unit": "relative", "better": "lower", "ci": prefill["ci"]}
    latency_s, rps = (requests.finished_s - requests.scheduled_s)[served], float(served.sum() / (to_s - from_s))
    value |= {"threshold": threshold, "prefill": prefill, "decode": decode, "rps": rps}
    return value | {"latency_p99_s": float(np.quantile(latency_s, 0.99))}


def _over_mean_at_place(duration_s: np.ndarray, prefills: np.ndarray) -> np.ndarray:
    """Return [decodes] times over the mean of those equally long after a prefill: a batch shrinks in a phase."""
    started = np.maximum.accumulate(np.where(prefills, np.arange(len(prefills)), -1))
    decodes = (started >= 0) & ~prefills
    place, seconds = (np.arange(len(prefills)) - started)[decodes], duration_s[decodes]
    return seconds / (np.bincount(place, weights=seconds) / np.maximum(np.bincount(place), 1))[place]


def _spread(seconds: np.ndarray) -> dict[str, Any]:
    """Return mean, range, and the range's interval from resampled blocks of consecutive values."""
    rng, blocks = np.random.default_rng(0), np.array_split(seconds, 40)
    again = [_range(np.concatenate([blocks[i] for i in rng.integers(40, size=40)])) for _ in range(400)]
    return {"mean_s": float(seconds.mean()), "range": _range(seconds), "ci": _interval(again)}


def _range(seconds: np.ndarray) -> float:
    """Return half of the width that contains 99 %, relative to the mean."""
    low, high = np.quantile(seconds, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float((high - low) / 2 / seconds.mean())
