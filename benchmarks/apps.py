"""SamuLLM's studies: gains over its methods, search time, distances to optima, the runner's cost, and real engines.

Counts and limits are the paper's, lengths are drawn from distributions with its facts. ``live`` profiles, plans and
runs three small models on a CPU by the CLI: each question has one, which answers until it generates a letter.
"""

import csv
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from string import Template
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from _harness import fresh_process, json_lines, summary
from _sections import TARGETS, Sections
from _vllm import require
from scipy.special import betaincinv, ndtri

from lengthwise import catalog, engine
from lengthwise.apps import launch, run
from lengthwise.apps.launch import Draft, Engine, SimulatedLauncher, TaskRequest
from lengthwise.apps.ledger import Output, State, open_ledger
from lengthwise.apps.plan import DEFAULT, PlanOptions, Served, Space, SwitchTimes, plan
from lengthwise.apps.plan.draws import draw
from lengthwise.apps.plan.evaluate import makespans_s, stages_of
from lengthwise.apps.plan.planner import CHANGE_SHARE
from lengthwise.schema.app import AppPlan, Cluster, Machine, ModelPlan, Replica, TaskDraw, Tasks
from lengthwise.schema.specs import AttentionSpec, FfnSpec, ModelSpec
from lengthwise.statistics import mean_estimate

sys.path.append(str(Path(__file__).parents[1] / "tests" / "apps"))  # optimal plans are those of the tests
from optimal_plans import best_staged, best_unpreempted

Ints = npt.NDArray[np.int64]
GREEDY, HEURISTICS = "samullm", ("max", "min")
OTHERS = (GREEDY, *HEURISTICS)
RESULTS = Path(__file__).parent / "results" / "apps.json"
TIMES = SwitchTimes(restarts_all=True)  # as in section 5.1


# Applications
@dataclass(frozen=True)
class Lengths:
    """Return integers from ``low`` to ``high`` with a mean: a scaled Beta distribution, wider for a smaller spread."""

    low: float
    mean: float
    high: float
    spread: float = 2.0

    def quantile(self, level: npt.ArrayLike) -> npt.NDArray[np.float64]:
        share = (self.mean - self.low) / (self.high - self.low)
        at = betaincinv(share * self.spread, (1 - share) * self.spread, np.asarray(level, np.float64))
        return np.rint(self.low + (self.high - self.low) * at)

    def times(self, factor: float) -> Self:
        return replace(self, mean=min(self.mean * factor, 0.9 * self.high))


ENSEMBLING_PROMPT, ENSEMBLING_OUTPUT = Lengths(5, 21, 127, 6.0), Lengths(1, 180, 490)  # MixInstruct, section 5.1
ROUTING_PROMPT, ROUTING_OUTPUT = Lengths(9, 310, 577, 4.0), Lengths(3, 199, 1585, 5.0)  # RouterBench, section 5.2
SUMMARY_OUTPUT, VERDICT_OUTPUT = Lengths(1, 500, 1200), Lengths(1, 150, 600)  # assumed: the paper has no numbers
ROUTED = {"llama-2-70b": 408, "mixtral-8x7b": 1267, "llama-2-13b": 2068, "codellama-34b": 456, "mistral-7b": 2657}
"""Table 1; WizardLM-13B-V1.2 has the shapes of Llama-2-13b."""
FACTORS = (1.2, 1.0, 0.7, 1.1, 1.0, 0.8, 1.1, 1.3, 0.8)
"""Mean outputs of the nine models over their mean: assumed, as the paper shows only that models differ."""
VICUNA, LLAMA_70B = Served("vicuna-13b-v1.5", "vicuna-13b"), Served("llama-2-70b-chat", "llama-2-70b")


def _shapes(name: str, layers: int, heads: int, ffn: FfnSpec, *, kv_heads: int = 0, vocab: int = 50432) -> ModelSpec:
    attention = AttentionSpec(heads, kv_heads or heads, 128)
    return ModelSpec(name, layers, heads * 128, vocab, attention, ffn, max_model_len=2048)


_NEOX = FfnSpec(20480, gated=False)
NINE = (
    VICUNA,
    Served("oasst-pythia-12b", _shapes("pythia-12b", 36, 40, _NEOX)),
    *(Served(name, "llama-2-13b") for name in ("alpaca-13b", "baize-v2-13b", "koala-13b")),
    Served("dolly-v2-12b", _shapes("dolly-v2-12b", 36, 40, _NEOX)),
    Served("mpt-7b-chat", _shapes("mpt-7b-chat", 32, 32, FfnSpec(16384, gated=False))),
    Served("chatglm3-6b", _shapes("chatglm3-6b", 28, 32, FfnSpec(13696), kv_heads=2, vocab=65024)),
    Served("stablelm-7b", _shapes("stablelm-7b", 16, 48, FfnSpec(24576, gated=False))),
)
"""The models of section 5.1."""
NINE_OUTPUTS = tuple(ENSEMBLING_OUTPUT.times(factor / float(np.mean(FACTORS))) for factor in FACTORS)


@dataclass(frozen=True)
class World:
    """An application: tasks, the models of their calls, and the distribution of each model's outputs."""

    tasks: Tasks
    models: tuple[Served, ...]
    lengths: tuple[Lengths, ...]

    def draws(self, seed: int, count: int, *, factor: float = 1.0) -> list[TaskDraw]:
        """Return samples of the lengths; ``factor`` scales their mean."""
        longest = [spec.max_model_len for spec in Space(self.models, cluster()).specs]
        lengths = [one.times(factor) for one in self.lengths]
        return [draw(self.tasks, lengths, longest, (seed, i)) for i in range(count)]

    def plan(self, draws: Sequence[TaskDraw], method: str = DEFAULT, others: Any = (), **more: Any) -> AppPlan:
        """Return a plan on 8 GPUs, or ``gpus``; search seconds are CPU seconds."""
        options = PlanOptions(method=method, additional=tuple(others), clock=time.process_time)
        where = cluster(more.pop("gpus", 8))
        return plan(self.tasks, draws, self.models, where, **{"times": TIMES} | more, options=options)


def cluster(gpus: int = 8) -> Cluster:
    node = catalog.node("a100-pairwise-nvlink-8")
    return Cluster((Machine(catalog.gpu("A100-80GB"), replace(node, gpus=gpus), gpus),))


def _tasks(models: Sequence[Served], model: Ints, prompt: Ints, max_tokens: Any, parents: Sequence[int] = ()) -> Tasks:
    """Return one row per task; each has at most one parent (-1: none)."""
    n, names, model = len(model), tuple(one.name for one in models), model.astype(np.int64)
    parent = np.array(parents, np.int64) if len(parents) else np.full(n, -1, np.int64)
    has_parent, zeros = parent >= 0, np.zeros(n, np.int64)
    limits = np.broadcast_to(np.asarray(max_tokens, np.int64), n).copy()
    return Tasks(
        calls=names, models=names, call=model, model=model, row=np.arange(n), round=zeros, index=zeros,
        prompt_tokens=prompt.astype(np.int64), max_tokens=limits, known_tokens=zeros,
        parent_start=np.concatenate([[0], np.cumsum(has_parent)]), parent=parent[has_parent],
        shown=np.ones(has_parent.sum(), np.int64), random_draw=np.full(n, -1, np.int64),
    )  # fmt: skip


def ensembling(requests: int, limit: int, *, seed: int = 0) -> World:
    """Return an application in which nine models answer every request (section 5.1)."""
    prompt = ENSEMBLING_PROMPT.quantile(np.random.default_rng((seed, 1)).random(requests))
    return World(_tasks(NINE, np.repeat(np.arange(9), requests), np.tile(prompt, 9), limit), NINE, NINE_OUTPUTS)


def routing(*, known: bool, seed: int = 0) -> World:
    """Return an application in which each request has one of five models (section 5.2)."""
    rng, count = np.random.default_rng((seed, 2)), sum(ROUTED.values())
    models = tuple(Served(name, name) for name in ROUTED)
    model = np.repeat(np.arange(len(ROUTED)), list(ROUTED.values()))
    tasks = _tasks(models, model, ROUTING_PROMPT.quantile(rng.random(count)), 4096)
    if known:
        tasks = replace(tasks, known_tokens=ROUTING_OUTPUT.quantile(rng.random(count)).astype(np.int64))
    return World(tasks, models, (ROUTING_OUTPUT,) * len(ROUTED))


def chain(documents: int, limit: int, evaluations: int, *, seed: int = 0) -> World:
    """Return an application that summarizes documents chunk by chunk and evaluates each summary (section 5.3)."""
    # Documents have 3 chunks in the median; the longest has 60 below 300 documents, else 201.
    level, longest = (np.arange(documents) + 0.5) / documents, 60 if documents < 300 else 201
    chunks = np.clip(np.rint(3 * np.exp(1.1 * ndtri(level))), 1, longest).astype(np.int64)
    chunks[-1] = longest
    model, parents = [], []
    for length in np.random.default_rng((seed, 3)).permutation(chunks).tolist():
        first, last = len(model), len(model) + length - 1
        model += [0] * length + [1] * evaluations
        parents += [-1, *range(first, last)] + [last] * evaluations
    models = (VICUNA, LLAMA_70B)
    prompt = np.array([2048, 300])[model]  # a chunk; about the template of Decipherpref
    return World(_tasks(models, np.array(model), prompt, limit, parents), models, (SUMMARY_OUTPUT, VERDICT_OUTPUT))


def mixed(documents: int, requests: int, limit: int, *, seed: int = 0) -> World:
    """Return a chain summary with four evaluations, and an ensembling (section 5.4)."""
    one, other = chain(documents, 900, 4, seed=seed), ensembling(requests, limit, seed=seed)
    a, b = one.tasks, other.tasks
    models = (*one.models, *(replace(m, name=f"{m.name} (answers)") for m in other.models))
    parents = np.full(len(a) + len(b), -1)
    parents[: len(a)][np.diff(a.parent_start) > 0] = a.parent
    columns = ((a.model, b.model + 2), (a.prompt_tokens, b.prompt_tokens), (a.max_tokens, b.max_tokens))
    tasks = _tasks(models, *map(np.concatenate, columns), parents.tolist())
    return World(tasks, models, one.lengths + other.lengths)


@dataclass(frozen=True)
class Case:
    """An application of a study; ``knows``: plans are made with the true lengths."""

    name: str
    world: World
    knows: bool = False

    @property
    def true(self) -> list[TaskDraw]:
        """Samples that plans are evaluated on."""
        return self.world.draws(2, 1 if self.knows else 6)

    def plan(self, additional: Sequence[str] = OTHERS) -> AppPlan:
        """Return the plan, checked."""
        engine.warm_up()
        known = self.true if self.knows else self.world.draws(1, 1)
        # As in a run, which starts the engines of a first plan.
        made = self.world.plan(known, others=additional, true_draws=self.true, begin=lambda _: None)
        assert {p.model for stage in made.stages for p in stage.plans} == set(self.world.tasks.model.tolist())
        for stage in made.stages:
            used = [gpu for replicas in stage.placement.values() for one in replicas for gpu in one]
            assert len(used) == len(set(used)), f"{self.name}: a GPU runs two models at once"
        ends_s = {one.name: one.planned_s + one.lead_s for one in made.methods}
        assert min(ends_s.values()) * (1.0 + CHANGE_SHARE) >= ends_s[DEFAULT], "another method plans a shorter one"
        return made

    def idle_s(self, method: str) -> float:
        """Return the GPU-seconds without a running model under a method's plan, loading included."""
        return sum(self.world.plan(self.true[:1], method).idle_s.values())


def _ratio(other_s: npt.ArrayLike, own_s: npt.ArrayLike) -> dict[str, Any]:
    """Return a ratio of means and its 95 % interval, paired by samples; None for fewer than two."""
    other, own = np.asarray(other_s), np.asarray(own_s)
    gain = float(other.mean() / own.mean())
    rest = mean_estimate((other - gain * own) / own.mean())
    return {"value": gain, "ci": (gain - rest.half_width, gain + rest.half_width) if len(own) > 1 else None}


def _ends_s(made: AppPlan) -> dict[str, npt.NDArray[np.float64]]:
    """Return seconds end to end on each sample by method."""
    return {one.name: np.array(one.makespans_s) + one.lead_s for one in made.methods}


def _summary_of(case: Case, made: AppPlan) -> dict[str, Any]:
    """Return a case as rows save it: seconds end to end and of the search by method, and the estimate's error."""
    ends_s, methods = _ends_s(made), {}
    for one in made.methods:
        methods[one.name] = {name: getattr(one, name) for name in ("planned_s", "search_s", "lead_s")}
        gain = _ratio(ends_s[one.name], ends_s[made.method])
        methods[one.name] |= {"makespan_s": one.makespan.value, "gain": gain["value"], "gain_ci": gain["ci"]}
    error = methods[DEFAULT]["planned_s"] / methods[DEFAULT]["makespan_s"] - 1
    return {"case": case.name, "tasks": len(case.world.tasks), "methods": methods, "estimate_error": error}


# Studies
def _cases(study: str, quick: bool) -> list[Case]:
    """Return the cases of sections 5.1 to 5.4; chain summaries change one of their settings at a time."""
    if study == "ensembling":
        counts = (1000,) if quick else (1000, 2000, 3000, 5000, 7000, 10_000)
        return [Case(f"{n} requests, limit {limit}", ensembling(n, limit)) for limit in (256, 512) for n in counts]
    if study == "routing":
        kinds = itertools.product(("unknown", "known"), range(1 if quick else 3))
        worlds = ((kind, seed, routing(known=kind == "known", seed=seed)) for kind, seed in kinds)
        return [Case(f"{kind} lengths, set {seed}", world, kind == "known") for kind, seed, world in worlds]
    if study == "chain":
        settings = [(documents, 900, 1) for documents in (100, 200, 300, 400, 500)]
        settings += [(100, limit, 1) for limit in (100, 300, 500, 700)]
        settings += [(documents, 900, evaluations) for documents in (100, 300) for evaluations in (2, 4)]
        return [
            Case(f"{documents} documents, limit {limit}, {times} evaluations", chain(documents, limit, times))
            for documents, limit, times in (settings[:1] if quick else settings)
        ]
    requests, sizes = (500, (100,)) if quick else (5000, (100, 200, 300, 400, 500))
    return [Case(f"{n} documents, {requests} requests", mixed(n, requests, 256)) for n in sizes]


def study(_: Path, quick: bool, name: str) -> dict[str, Any]:
    """Return lowest and highest gains over each heuristic and the greedy search, the latter's own, and all cases."""
    found = [_summary_of(case, case.plan()) for case in _cases(name, quick)]
    rows: dict[str, Any] = {f"apps.{name}.cases": {"value": len(found), "unit": "cases", "cases": found}}
    for other in (*HEURISTICS, GREEDY):
        for end, pick in (("lowest", min), ("highest", max)):
            case = pick(found, key=lambda one: one["methods"][other]["gain"])
            gain, ci = (case["methods"][other][key] for key in ("gain", "gain_ci"))
            row = {"value": gain, "unit": "times", "ci": ci, "case": case["case"]}
            figure = f"apps.{name}.speedup_over_{other}_{end}"
            rows[figure] = row | {"paper": TARGETS[figure][0] if other in HEURISTICS else None}
    return rows | _of_greedy(name, found)


def idle(_: Path, quick: bool, name: str) -> dict[str, Any]:
    """Return idle GPU time of the heuristics and of Algorithm 1 over the planner's, and over Algorithm 1's (5.3)."""
    idle_s = [{of: case.idle_s(of) for of in (DEFAULT, *OTHERS)} for case in _cases(name, quick)]
    rows = {}
    for other, own in ((GREEDY, DEFAULT), *itertools.product(HEURISTICS, (DEFAULT, GREEDY))):
        ratios, over = [one[other] / one[own] for one in idle_s], "ours" if own == DEFAULT else own
        rows[f"apps.{name}.idle_{other}_over_{over}"] = {"value": mean(ratios), "unit": "times", "ratios": ratios}
    return rows


def _of_greedy(name: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the lowest and the highest gain of the paper's greedy search over each heuristic, and shares of search."""
    rows, cases = {}, {case["case"]: case["methods"] for case in found}
    for other, (end, pick) in itertools.product(HEURISTICS, (("lowest", min), ("highest", max))):
        gains = {case: of[other]["gain"] / of[GREEDY]["gain"] for case, of in cases.items()}
        case, paper = pick(gains, key=gains.__getitem__), TARGETS[f"apps.{name}.speedup_over_{other}_{end}"][0]
        row = {"value": gains[case], "unit": "times", "case": case, "paper": paper}
        rows[f"apps.{name}.samullm_over_{other}_{end}"] = row
    for method in OTHERS:
        shares = [of[method]["search_s"] / (of[method]["makespan_s"] + of[method]["search_s"]) for of in cases.values()]
        rows[f"apps.{name}.search_share_{method}"] = {"value": max(shares), "unit": "share", "better": "lower"}
    return rows


def ablation(_: Path, quick: bool) -> dict[str, Any]:
    """Return the effect of preemption and of known or different lengths (section 5.5, Figure 14)."""
    rows: dict[str, Any] = {}
    for limit in (256,) if quick else (256, 512):
        world = mixed(100, 500, limit) if quick else mixed(500, 5000, limit)
        unknown = Case(f"limit {limit}, unknown lengths", world)
        known = Case(f"limit {limit}, known lengths", world, knows=True)
        additional = (GREEDY, f"{GREEDY}_no_preemption", "min", "min_no_preemption")
        made, space = unknown.plan(additional), Space(world.models, cluster(), TIMES)
        total_s = {name: float(s.mean()) for name, s in _ends_s(made).items()}
        (blind_s,) = makespans_s(stages_of(world.tasks, known.true, space), made.planned, made.reserve)
        known_s = known.plan(additional).makespan.value
        for name, value, paper in (
            ("no_preemption_over_ours", total_s[f"{GREEDY}_no_preemption"] / total_s[DEFAULT], "its greedy 1.0 to 1.2"),
            ("no_preemption_of_greedy", total_s[f"{GREEDY}_no_preemption"] / total_s[GREEDY], "1.0 to 1.2"),
            ("no_preemption_of_min", total_s["min_no_preemption"] / total_s["min"], "1.3 to 1.4"),
            ("known_over_unknown", blind_s / known_s, "1.0 to 1.1"),
        ):
            rows[f"apps.{name}_{limit}"] = {"value": value, "unit": "times", "paper": paper}
        planned_s = next(one.planned_s for one in made.methods if one.name == made.method)
        errors = {}
        for factor in (0.7, 0.85, 1.15, 1.3):
            truth = stages_of(world.tasks, world.draws(5, 1, factor=factor), space)
            errors[f"{factor:g}"] = planned_s / makespans_s(truth, made.planned, made.reserve)[0] - 1
        row = {"value": max(map(abs, errors.values())), "unit": "relative", "by_factor": errors}
        rows[f"apps.other_set_error_{limit}"] = row | {"paper": "6.5 % to 38.7 %, mean 25.6 %"}
    return rows


def greedy(_: Path, quick: bool) -> dict[str, Any]:  # noqa: ARG001 - only reads saved rows
    """Return gains over the paper's greedy search in all saved cases of the studies: geometric mean and lowest."""
    gains = {
        f"{row['name'].split('.')[1]}: {case['case']}": case["methods"][GREEDY]["gain"]
        for row in json_lines(RESULTS)
        if row["name"].endswith(".cases")
        for case in row["details"]["cases"]
    }
    logs, lowest = mean_estimate([math.log(gain) for gain in gains.values()]), min(gains, key=gains.__getitem__)
    mean = {"value": math.exp(logs.value), "ci": (math.exp(logs.low), math.exp(logs.high)), "gains": gains}
    return {"apps.better_over_greedy": mean, "apps.better_over_greedy_lowest": {"value": gains[lowest], "case": lowest}}


def search(_: Path, quick: bool) -> dict[str, Any]:
    """Time the search of all methods for ten models and the largest mixed application; repeats find the same plan."""
    engine.warm_up()
    ten, prompt = (*NINE, LLAMA_70B), ensembling(1112, 512).tasks.prompt_tokens[:10_000]
    ten_models = World(_tasks(ten, np.arange(10_000) % 10, prompt, 512), ten, (*NINE_OUTPUTS, NINE_OUTPUTS[0]))
    rows, studies = {}, [("apps.search_s", ten_models, 1 if quick else 3, (22, 69))]
    studies += [] if quick else [("apps.search_mixed_s", mixed(500, 5000, 256), 1, 68)]
    for name, world, repeats, paper_s in studies:
        plans = [world.plan(world.draws(1, 1), others=OTHERS) for _ in range(repeats)]
        assert len({one.planned for one in plans}) == 1, "the same application was planned in two ways"
        row = {"unit": "s", "tasks": len(world.tasks), "paper_s": paper_s}
        row["methods_s"] = {one.name: one.search_s for one in plans[0].methods}
        rows[name] = summary([one.search_s for one in plans]) | row
    return rows


def one_model(_: Path, quick: bool) -> dict[str, Any]:
    """Return the gain of eight GPUs over one for chatglm3-6b alone, limit 512 (section 5.1), loading included."""
    rows, which = {}, [one.name for one in NINE].index("chatglm3-6b")
    models, lengths = NINE[which : which + 1], NINE_OUTPUTS[which : which + 1]
    for requests, paper in ((1000, "1.5 times"), (10_000, "5.3 times"))[: 1 if quick else 2]:
        prompt = ensembling(requests, 512).tasks.prompt_tokens[:requests]
        world = World(_tasks(models, np.zeros(requests), prompt, 512), models, lengths)
        one, eight = (world.plan(world.draws(2, 6), "max", gpus=gpus) for gpus in (1, 8))
        load_s = [max(span.end_s for span in made.spans if span.what == "load") for made in (one, eight)]
        alone_s = [made.makespan.value - s for made, s in zip((one, eight), load_s, strict=True)]
        row = _ratio(one.makespans_s, eight.makespans_s) | {"unit": "times", "without_loading": alone_s[0] / alone_s[1]}
        seconds = {"one_s": one.makespan.value, "eight_s": eight.makespan.value, "load_s": load_s}
        rows[f"apps.one_model_{requests}_speedup"] = row | seconds | {"paper": paper}
    return rows


def sequential(_: Path, quick: bool) -> dict[str, Any]:
    """Return by method the time of chain summary, then ensembling, over that of both together (section 5.4)."""
    ratios: dict[str, dict[int, Any]] = {name: {} for name in (DEFAULT, *OTHERS)}
    for n in (100,) if quick else (100, 200, 300, 400, 500):
        both, one, other = mixed(n, 5000, 256), chain(n, 900, 4), ensembling(5000, 256)
        drawn, each = [both.draws(1, 1), both.draws(2, 6)], []  # the parts have the same lengths
        for world, at in ((both, slice(None)), (one, slice(len(one.tasks))), (other, slice(len(one.tasks), None))):
            rows = [[(d.present[at], d.prompt_tokens[at], d.output_tokens[at]) for d in draws] for draws in drawn]
            known, true = ([TaskDraw(*row) for row in draws] for draws in rows)
            each.append(_ends_s(world.plan(known, others=OTHERS, true_draws=true, begin=lambda _: None)))
        for name, by_documents in ratios.items():
            by_documents[n] = _ratio(each[1][name] + each[2][name], each[0][name])
    rows = {name: summary([one["value"] for one in of.values()]) | {"unit": "times"} for name, of in ratios.items()}
    return {f"apps.mixed.sequential_over_joint_{name}": rows[name] | {"by_documents": ratios[name]} for name in rows}


# Distances to optima
SMALL = (0, 6, 7)  # of the nine: one of 13B, one of 7B, one of 6B


def exact(_: Path, quick: bool) -> dict[str, Any]:
    """Return distances of plans to the best staged plan of small instances, and to the best without preemption."""
    engine.warm_up()
    rows, each = {}, []
    models, lengths = tuple(NINE[i] for i in SMALL), tuple(NINE_OUTPUTS[i] for i in SMALL)
    for seed in range(3 if quick else 12):  # three models with 200 to 3,000 requests each
        counts = np.random.default_rng((seed, 7)).integers(200, 3000, len(SMALL))
        model = np.repeat(np.arange(len(SMALL)), counts)
        world = World(_tasks(models, model, np.full(len(model), 21), 256), models, lengths)
        gaps, _optimum = _gaps(world, seed, 2, best_staged)
        assert min(gaps.values()) >= -0.02, f"a plan is shorter than the best of all: {gaps}"
        each.append(gaps)
    for name, row in {DEFAULT: "apps.gap_to_exact", GREEDY: "apps.gap_to_exact_greedy"}.items():
        some = [gaps[name] for gaps in each]
        rows[row] = summary(some) | {"value": mean(some), "unit": "relative", "each": some}
    for name, world in {"routing": routing(known=False), "ensembling": ensembling(1000, 512)}.items():
        gaps, best = _gaps(world, 1, 8, best_unpreempted)
        bounds = {"optimum_s": best.makespan_s, "bound_s": best.bound_s, "proved": best.proved}
        rows[f"apps.gap_to_unpreempted_{name}"] = {"value": gaps[DEFAULT], "unit": "relative"} | bounds
    return rows


def _gaps(world: World, seed: int, gpus: int, solve: Any) -> tuple[dict[str, float], Any]:
    """Return by method how much longer its plan is than the optimum of an exact solver, and that optimum."""
    draws = world.draws(seed, 1)
    best = solve(stages_of(world.tasks, draws, Space(world.models, cluster(gpus)))[0])
    made = world.plan(draws, others=OTHERS, gpus=gpus, times=None)
    return {one.name: one.planned_s / best.makespan_s - 1 for one in made.methods}, best


class Instant:
    """An engine that answers at once."""

    max_num_seqs, description, is_alive = 256, "answers at once", True

    async def has_died(self, within_s: float) -> bool:  # noqa: ARG002
        return False

    async def generate(self, request: TaskRequest, draft: Draft) -> Output:
        draft.finish_reason = "stop"
        return Output(f"answer {request.task}", "stop", 20, 1)


class InstantLauncher(SimulatedLauncher):
    """Starts engines without delay, so that only the runner takes time."""

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:  # noqa: ARG002
        self.starts += 1
        return Instant()

    async def stop(self, engine: Engine) -> None:
        pass


def drain(tasks: int, *, instant: bool) -> dict[str, Any]:
    """Plan and run tasks; return seconds of the run, and check that every task is answered."""
    world = ensembling(-(-tasks // 9), 256)
    (draw,) = world.draws(1, 1)
    made, space = world.plan([draw], "min", times=None), Space(world.models, cluster())
    started_s = time.perf_counter()
    seconds = (lambda _plan, _how: 0.0) if instant else space.seconds
    kind = InstantLauncher if instant else SimulatedLauncher
    launcher = kind(world.tasks.models, space.deployment, launch.Lengths.of(world.tasks, draw), seconds)
    work = run.RunTasks(world.tasks, run.DrawDecider(world.tasks, draw), run.expected_tokens([draw]), "benchmark")
    job = run.job_of(work, run.Planned(run.run_plan_of(made), run.ClusterPlacer(space.cluster, seconds)))
    with tempfile.TemporaryDirectory() as folder, open_ledger(Path(folder) / "ledger.sqlite") as ledger:
        result = run.run_simulated(job, ledger, launcher)
    assert result.of(State.DONE) == len(world.tasks)
    return {"tasks": len(world.tasks), "run_s": time.perf_counter() - started_s}


def _measured(tasks: int, *, instant: bool) -> dict[str, Any]:
    return fresh_process(
        f"import json, resource, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import apps\n"
        f"apps.engine.warm_up(); found = apps.drain({tasks}, instant={instant})\n"
        "found['peak_mib'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024; print(json.dumps(found))"
    )


def runner(_: Path, quick: bool) -> dict[str, Any]:
    runs = [_measured(10_000, instant=True) for _ in range(1 if quick else 3)]
    return {"apps.runner_overhead_ms": summary([1000 * one["run_s"] / one["tasks"] for one in runs])}


def million(_: Path, quick: bool) -> dict[str, Any]:
    found, name = _measured(45_000 if quick else 1_000_000, instant=False), f"apps.drain_{'quick' if quick else '1e6'}"
    return {f"{name}_peak_mib": {"value": found["peak_mib"], "unit": "MiB", "better": "lower", "details": found}}


EXAMPLES = Path(__file__).parents[1] / "examples" / "apps"
APP, MODELS = Path(__file__).parent / "three-models.toml", ("alder", "birch", "cedar")
BUSY_LOAD = 3.0  # load average at the end of a run above which it is reported, not counted; fixed before measuring


@dataclass(frozen=True)
class Measurement:
    folder: Path

    def app(self, rows: str, cores: int, *, known: bool = False) -> Path:
        """Write the application's file over some rows."""
        words = {"python": require(), "folder": self.folder, "examples": EXAMPLES, "rows": rows, "cores": cores}
        text = Template(APP.read_text("utf-8")).substitute(words, known='known_tokens = "tokens"' if known else "")
        path = self.folder / f"{rows}-{cores}{'-known' if known else ''}.toml"
        path.write_text(text, "utf-8")
        return path

    def write_rows(self, name: str, questions: Sequence[str], tokens: Sequence[int] = ()) -> None:
        """Write the model of each question, and the length of its answer where it is known."""
        with (self.folder / f"{name}.csv").open("w", newline="") as file:
            rows = zip(itertools.cycle(MODELS), questions, tokens or [""] * len(questions), strict=False)
            csv.writer(file).writerows([("model", "question", "tokens"), *rows])

    def command(self, *words: str | Path) -> None:
        with (self.folder / "commands.log").open("a") as log:
            command = [sys.executable, "-m", "lengthwise.cli", "app", *map(str, words)]
            subprocess.run(command, check=True, stdout=log, stderr=log, timeout=900)

    def case(self, cores: int, repeats: int, *, known: bool) -> dict[str, Any]:
        """Plan an application and run it; return estimated and measured seconds."""
        name, profile = f"{cores}-{'known' if known else 'unknown'}", ("--profile", self.folder / "profile")
        app, path = self.app("known" if known else "run", cores, known=known), self.folder / f"{name}.plan.json"
        self.command("plan", app, *profile, "--no-what-if", "--draws", "4", "--json", path)
        estimate, pairs, quiet = json.loads(path.read_text())["makespan"], [], []
        for repeat in range(repeats):
            out = self.folder / f"{name}-{repeat}"
            self.command("run", app, *profile, "--plan", path, "--out", out)
            run = json.loads((out / "manifest.json").read_text())
            pairs.append((run["seconds"], estimate["value"] / run["seconds"] - 1))
            quiet += [pairs[-1]] if os.getloadavg()[0] <= BUSY_LOAD else []
        stages = [[f"{each['model']} x{each['dp']}" for each in stage] for stage in run["plan"]]
        found = {"cores": cores, "plan": stages, "busy": [pair for pair in pairs if pair not in quiet]}
        found |= {"estimate_s": estimate["value"], "estimate_half_width_s": estimate["half_width"]}
        return found | {"measured_s": [seconds for seconds, _ in quiet], "errors": [error for _, error in quiet]}


def live(_: Path, quick: bool) -> dict[str, Any]:
    """Return errors of makespans with unknown lengths, then with those of the first run (requests have seeds)."""
    rows, sample = (24, 24) if quick else (180, 90)  # questions that are run, and others for the profile of lengths
    repeats, cores = (1, (1,)) if quick else (5, (1, 2))  # one model at a time, or two
    questions = [row["question"] for row in json_lines(EXAMPLES / "questions.jsonl")]
    with tempfile.TemporaryDirectory() as scratch:
        place = Measurement(Path(scratch).resolve())
        words = [require(), str(EXAMPLES / "make_models.py"), str(place.folder / "models")]
        subprocess.run(words, check=True, capture_output=True, timeout=300)
        place.write_rows("run", questions[:rows])
        place.write_rows("sample", questions[-sample:])
        app, out = place.app("sample", 1), place.folder / "profile"
        for _ in range(3):  # measures again only what other load spoiled
            place.command("profile", app, "--out", out, "--rows", str(sample), "--times", "2", "--calibrate")
            if len(json.loads((out / "profile.json").read_text())["costs"]) == len(MODELS):
                break
        unknown = [place.case(n, repeats, known=False) for n in cores]
        outputs = json_lines(place.folder / f"{cores[0]}-unknown-0" / "outputs.jsonl")
        place.write_rows("known", questions[:rows], [int(row["output_tokens"]) for row in outputs])
        known = [place.case(n, repeats, known=True) for n in cores]
    rows = {}
    for name, cases in (("apps.estimate_error_live", unknown), ("apps.estimate_error_live_known", known)):
        error = mean_estimate([abs(one) for case in cases for one in case["errors"]])
        ci = (max(error.low, 0.0), error.high) if error.has_interval else None
        rows[name] = {"value": error.value, "ci": ci, "cases": cases}
    return rows


SECTIONS = Sections("apps", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
