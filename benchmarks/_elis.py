"""ELIS' evaluation (Tables 5 and 6, Figures 1, 5 and 6) repeated in simulation, and how much more is possible.

Five models on one A100-80GB, batches of 1, 2 and 4, 1x, 3x and 5x the rate of one request after the other, Gamma
arrivals of shape 0.73, 200 prompts in three shuffles. Prompts are AlpacaEval's (non-commercial: for evaluation,
never for training), outputs those of the same model or its nearest relative there (``MODELS``). Which policy is
"own" is chosen on 200 other prompts of the set."""

import gzip
import itertools
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import _predict
import _texts
import numpy as np
from _harness import RECORDED

from lengthwise import Deployment, EngineLimits, Scheduler, Workload, engine, policy, predict, search, workload
from lengthwise.config.workload import read_trace
from lengthwise.lab import Contestant, Question, lab
from lengthwise.lab.experiment import at_rate, isolated_s
from lengthwise.predict import Ensemble, Prompts, Samples
from lengthwise.predict.encoder import Encoder, SentenceEncoder
from lengthwise.predict.lexical import Lexical
from lengthwise.schema.lab import Cell, LabTable, LoadUnit
from lengthwise.statistics import t_half_width

FOLDER = "data/text/nc_alpaca_eval"
MODELS, MEMORY = (RECORDED["elis"][key] for key in ("models", "memory"))
LOADS, BATCHES = (1.0, 3.0, 5.0), (1, 2, 4)
PROMPTS, SHUFFLES, SHAPE, WINDOW_TOKENS = 200, 3, 0.73, 50
GPU = "A100-80GB"
RETAINED, PREEMPTIVE = "no preemption", "preemption"
IMPROVEMENT = "worth(factor=1)"
OTHERS = {"ELIS ISRTF": "elis", "SRTF": "srtf", "Gittins": "gittins", "HRRN": "hrrn"}
HEADLINE = "ensemble"
R2S = (0.4, 0.85)
WAITS = (0.9, 1.0, 1.2, 1.4, 2.0)
"""Bounds on waiting, in 99th percentiles of JCT under FCFS at the same load."""
PREDICTION_S = {"once": (0.01104, 0.0), "windows": (0.01104, 0.01104), "encoder, windows": (0.0029, 0.0029)}
"""Seconds before a request joins the queue, and before each window: Section 6.2, and ``predict.encoder_ms``."""
SENTENCES = Path(__file__).with_name("sentences.txt")
Tables = dict[str, LabTable]
"""By model."""


@lru_cache(maxsize=16)
def texts(shared: Path, outputs: str, *, tuning: bool = False) -> Samples:
    """Return the sampled prompts of one model, the same for every shuffle; for tuning others than are evaluated."""
    tokens = "n_tok_tekken131k"

    def sampled(name: str, seed: int = 0, without: Collection[int] = ()) -> list[dict[str, Any]]:
        rows = _texts.lines(shared / FOLDER / "outputs" / f"{name}.jsonl.gz")
        rows = [row for row in rows if row[tokens] > 0 and row["idx"] not in without]
        return [rows[i] for i in np.random.default_rng(seed).choice(len(rows), PROMPTS, replace=False)]

    prompt_of = {row["idx"]: row for row in _texts.lines(shared / FOLDER / "instructions.jsonl.gz")}
    rows = sampled(outputs)
    if tuning:
        rows = sampled(outputs, 1, {row["idx"] for _, name in MODELS.values() for row in sampled(name)})
    given, n = [prompt_of[row["idx"]] for row in rows], len(rows)
    counts = [np.array([row[tokens] for row in of], np.int64) for of in (given, rows)]
    prompts = Prompts(n, [row["instruction"] for row in given], counts[0], [outputs] * n)
    return Samples(prompts, counts[1], np.zeros(n, bool), [row["output"] for row in rows])


@dataclass(frozen=True)
class Bench:
    """One model's part of the laboratory, by the paper's name; ``predictors`` have arguments of ``predict.attach``."""

    shared: Path
    model: str
    predictors: dict[str, Any]
    tuning: bool = False

    def requests(self, seed: int, predictor: str) -> Workload:
        """Return the prompts in the order of a shuffle with predictions; the laboratory sets the rate."""
        outputs, seed = MODELS[self.model][1], seed + SHUFFLES * self.tuning
        max_tokens = self.deployment(Scheduler(), max(BATCHES)).max_model_len
        rng, known = np.random.default_rng([seed, 0xE115]), texts(self.shared, outputs, tuning=self.tuning)
        known = known.take(rng.permutation(len(known)))
        columns = {"prompt": known.prompts.text, "output": known.output, "model": known.prompts.model}
        extra = {name: np.array(column, object) for name, column in columns.items()}
        gaps_s, prompt = workload.Gamma(1.0, SHAPE**-0.5).sample(len(known), rng), known.prompts.prompt_tokens
        made = Workload(gaps_s, prompt, np.minimum(known.output_tokens, max_tokens - prompt), extra=extra, name=outputs)
        if not predictor:
            return made
        which, options = self.predictors[predictor]
        return predict.attach(made, which, seed=seed, **options)

    def deployment(self, scheduler: str | Scheduler, batch: int, memory: float = 0.9) -> Deployment:
        limits = EngineLimits(max_num_seqs=batch, gpu_memory_utilization=memory)
        return engine.deploy(MODELS[self.model][0], GPU, limits=limits, scheduler=scheduler)


@lru_cache
def ensemble(text: Path, quick: bool) -> Ensemble:
    """Return the mean of the shipped predictor, of words and of sentence vectors, trained without AlpacaEval."""
    more = [] if quick else [_texts.instructions(text, "llamafactory_demo", "alpaca_en_demo")]
    samples = _texts.without(_texts.together([_texts.oasst(text), *more]), _texts.alpaca_eval(text).prompts.text)
    words = _predict.learnt(text, quick)[1] if quick else Lexical().fit(_texts.wide(text))
    return Ensemble([predict.default(), words, Encoder(max_windows=500 if quick else 2000).fit(samples)], [1.0] * 3)


def predictors(shared: Path, model: str, *, quick: bool) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return predictors by name, with the statistic of the distribution that policies use (``predict.attach``)."""
    text, outputs = shared / "data" / "text", MODELS[model][1]
    learnt, lexical = _texts.oasst(text), predict.default()
    spread = float(np.std(np.log(texts(shared, outputs).output_tokens)))
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "oracle": (predict.Oracle(), {}),
        "constant": (predict.Same(float(learnt.output_tokens.mean())), {}),
        "ecdf, survival": (predict.Conditional(predict.Ecdf().fit(learnt)), {}),
        "default": (lexical, {}),
        "default, median": (lexical, {"statistic": "median"}),
        HEADLINE: (ensemble(text, quick), {"statistic": "median"}),
    }
    for r2 in R2S:  # of the logarithm; the truth times a log-normal factor, predicted once
        error = predict.LogNormalError(spread * math.sqrt((1 - r2) / r2))
        made[f"oracle, R2 {r2:g}"] = (error, {"statistic": "median", "update_predictions": False})
    return made


def contestants(*, others: bool, waits: Sequence[float]) -> tuple[Contestant, ...]:
    """Return our policies, without and with preemption and with bounds on waiting, and others without a bound."""

    def unbounded(name: str) -> Scheduler:
        return replace(policy.scheduler(name), max_wait_s=math.inf)

    made = [Contestant(name, unbounded(named)) for name, named in OTHERS.items() if others]
    own = {RETAINED: unbounded("sjf"), PREEMPTIVE: replace(unbounded("isrtf"), preemption=IMPROVEMENT)}
    for name, scheduler in own.items():
        made.append(Contestant(name, scheduler))
        made += [Contestant(f"{name}, wait {w:g}", scheduler, max_wait_factor=w) for w in waits]
        if others:  # a second of age makes a request five tokens shorter
            made.append(Contestant(f"{name}, aged 5", replace(scheduler, rank="aged(weight=5)")))
    return tuple(made)


def tables(shared: Path, shuffles: int, *, tuning: bool, quick: bool) -> Tables:
    """Return a laboratory per model: every policy and predictor; for tuning only own policies, on other prompts."""
    engine.warm_up()
    made = {}
    for model in list(MODELS)[: 2 if quick else None]:
        every = predictors(shared, model, quick=quick).items()
        known = {name: of for name, of in every if not quick or name in ("oracle", HEADLINE)}
        policies = contestants(others=not tuning, waits=WAITS[::2] if quick else WAITS)
        question = Question(policies, tuple(known), LOADS, BATCHES, shuffles, LoadUnit.ALONE, name=model)
        with search.threads() as workers:
            made[model] = lab(question, Bench(shared, model, known, tuning), each=workers.run)
    return made


def over_cells(of: Tables, policy_name: str, predictor: str) -> dict[str, float]:
    """Return means over all models, loads and batch sizes for a policy, and the gap closed by load."""
    cells = [c for t in of.values() for c in t.cells if (c.policy, c.predictor) == (policy_name, predictor)]
    known = [c for c in cells if not math.isnan(c["gap_closed"].value)]

    def mean(metric: str, some: list[Any]) -> float:
        return float(f"{np.mean([c[metric].value for c in some]):.6g}") if some else math.nan

    tails = {"p99_over_fcfs": mean("jct.p99/fcfs", cells), "p99_over_oracle": mean("jct.p99/oracle", cells)}
    by_load = {f"gap_closed_{load:g}x": mean("gap_closed", [c for c in known if c.load == load]) for load in LOADS}
    preemptions = mean("preemptions_per_request", cells)
    return {"gap_closed": mean("gap_closed", known), **tails, "preemptions": preemptions, **by_load}


def frontier(of: Tables, predictor: str) -> list[dict[str, Any]]:
    cells = (c for t in of.values() for c in t.cells if c.predictor == predictor and c.policy != "oracle")
    names = dict.fromkeys(c.policy for c in cells)
    return [{"policy": name, **over_cells(of, name, predictor)} for name in names]


def chosen(tuned: list[dict[str, Any]], tail: str, most: float) -> str:
    """Return the policy that closes most of the gap within a bound on the tail, on other prompts than evaluated."""
    within = [point for point in tuned if point[tail] <= most] or [min(tuned, key=lambda point: point[tail])]
    return str(max(within, key=lambda point: point["gap_closed"])["policy"])


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    _predict.installed_encoder()
    tuning = tables(shared, SHUFFLES - 1, tuning=True, quick=quick)
    evaluated = tables(shared, 2 if quick else SHUFFLES, tuning=False, quick=quick)
    names = list(dict.fromkeys(c.predictor for t in evaluated.values() for c in t.cells if c.predictor))
    near = {name: chosen(frontier(tuning, name), "p99_over_oracle", 1.05) for name in names}
    fair = {name: chosen(frontier(tuning, name), "p99_over_fcfs", 1.15) for name in names}

    def of(policy_name: str, predictor: str) -> dict[str, Any]:
        return {"policy": policy_name, **over_cells(evaluated, policy_name, predictor)}

    def headline(policy_name: str, metric: str = "gap_closed") -> dict[str, Any]:
        found = of(policy_name, HEADLINE)
        by_model = {m: over_cells({m: t}, policy_name, HEADLINE)[metric] for m, t in evaluated.items()}
        half = by_model["half_width"] = float(f"{t_half_width(list(by_model.values()), 0.95):.2g}")
        found |= {"value": found[metric], "ci": (found[metric] - half, found[metric] + half)}
        return found | {"predictor": HEADLINE, "by_model": by_model}

    by_predictor = {
        name: {"within 5 % of the oracle's P99": of(near[name], name), "within 15 % of FCFS' P99": of(fair[name], name)}
        for name in names
    }
    return {
        "elis.gap_closed": headline(near[HEADLINE]),
        "elis.p99_over_oracle": headline(near[HEADLINE], "p99_over_oracle"),
        "elis.gap_closed_at_p99_115": headline(fair[HEADLINE]), "elis.by_predictor": by_predictor,
        "elis.frontier": {name: frontier(evaluated, name) for name in names},
        "elis.table5": table5(evaluated, near[HEADLINE], HEADLINE), "elis.figure6": figure6(evaluated),
        "elis.queueing": queueing(evaluated["opt13" if quick else "lam13"]),
        "elis.prediction_time": prediction_time(shared, evaluated, quick=quick),
    }  # fmt: skip


def table5(evaluated: Tables, own: str, predictor: str) -> dict[str, Any]:
    """Return mean JCT in seconds at batch 4: FCFS, ELIS' ISRTF, ours, SJF with known lengths."""
    policies = {"FCFS": ("fcfs", ""), "ISRTF": ("ELIS ISRTF", predictor), "own": (own, predictor)}
    policies["SJF"], made = ("oracle", "oracle"), {}
    for (model, table), load in itertools.product(evaluated.items(), LOADS):
        of = {name: _cell(table, max(BATCHES), load, *key)["jct.mean"].value for name, key in policies.items()}
        made[f"{model} {load:g}x"] = of
    return made


def figure6(evaluated: Tables) -> dict[str, float]:
    """Return by batch size and load the reduction of mean JCT from FCFS to ELIS' ISRTF, over models, in percent."""
    made = {}
    for batch, load in itertools.product(BATCHES, LOADS):
        ratios = [_cell(t, batch, load, "ELIS ISRTF", HEADLINE)["jct.mean/fcfs"].value for t in evaluated.values()]
        made[f"batch {batch}, {load:g}x"] = float(f"{100 * (1 - np.mean(ratios)):.3g}")
    return made


def _cell(table: LabTable, batch: int, load: float, policy_name: str, predictor: str = "") -> Cell:
    return next(c for c in table.at(batch, load) if (c.policy, c.predictor) == (policy_name, predictor))


def queueing(table: LabTable) -> dict[str, float]:
    """Return Figure 5, right: reductions of mean JCT and wait from FCFS to ELIS' ISRTF at batch 4 and 5x."""
    at = max(BATCHES), max(LOADS)
    fcfs, isrtf = _cell(table, *at, "fcfs"), _cell(table, *at, "ELIS ISRTF", HEADLINE)
    jct_s, wait_s = ((fcfs[name].value, isrtf[name].value) for name in ("jct.mean", "wait.mean"))
    lower = {"jct_lower": 1 - jct_s[1] / jct_s[0], "wait_lower": 1 - wait_s[1] / wait_s[0]}
    return {"value": (wait_s[0] - wait_s[1]) / (jct_s[0] - jct_s[1]), **lower}


def prediction_time(shared: Path, evaluated: Tables, *, quick: bool) -> dict[str, Any]:
    """Return by how much the time of predictions raises mean JCT under ELIS' ISRTF at batch 4, by case and cell."""
    at, added = max(BATCHES), {name: {} for name in PREDICTION_S}
    for model, table in evaluated.items():
        bench = Bench(shared, model, {HEADLINE: predictors(shared, model, quick=quick)[HEADLINE]})
        deployment = bench.deployment(replace(policy.scheduler("elis"), max_wait_s=math.inf), at)
        orders = [bench.requests(seed, HEADLINE) for seed in range(SHUFFLES)]
        for load, (name, (seconds, window_s)) in itertools.product(LOADS, PREDICTION_S.items()):
            free, jct_s = _cell(table, at, load, "ELIS ISRTF", HEADLINE), []
            host_s = deployment.cost.host_s + window_s / WINDOW_TOKENS
            slower = replace(deployment, cost=replace(deployment.cost, host_s=host_s))
            for seed, order in enumerate(orders):
                work, before_s = at_rate(order, free.rate_rps), seconds * np.arange(len(order))
                ready_s = np.maximum.accumulate(work.arrival_s - before_s) + before_s + seconds
                run = engine.simulate(replace(work, arrival_s=ready_s), slower, seed=seed, max_log_steps=0)
                jct_s.append(float(np.mean(run.requests.finished_s - work.arrival_s)))
            added[name][f"{model} {load:g}x"] = float(np.mean(jct_s)) / free["jct.mean"].value - 1
    mean = {name: float(np.mean(list(cells.values()))) for name, cells in added.items()}
    return {"value": mean["once"], "mean": mean, "seconds": PREDICTION_S, "added": added}


def preemption(shared: Path, quick: bool) -> dict[str, Any]:
    """Return Table 6: the batch size, in steps of 10, at which memory runs out, 10,000 requests at once under FCFS.

    They are drawn repeatedly from 200 prompts. Again with output lengths scaled so that requests alone take as long
    as in the paper's Table 4.
    """
    found = {}
    for model, (share, paper, alone_s) in list(MEMORY.items())[: 1 if quick else None]:
        bench, known = Bench(shared, model, {}), texts(shared, MODELS[model][1])
        own_s = float(np.nanmean(isolated_s(bench.requests(0, ""), bench.deployment("vllm_v1", 4), "kernel")))
        drawn = known.take(np.random.default_rng(0).choice(len(known), 10_000))
        prompt = drawn.prompts.prompt_tokens
        row = {"memory": share, "paper": paper, "alone_s": own_s, "paper_alone_s": alone_s}
        for name, scale in (("batch", 1.0), ("batch_scaled", alone_s / own_s)):
            output, row[name] = np.maximum(1, np.rint(drawn.output_tokens * scale).astype(np.int64)), 0
            row |= {f"{name}_tokens_mean": float((prompt + output).mean())}
            for batch in range(10, 251, 10):
                deployment = bench.deployment("vllm_v0", batch, share)
                tokens = np.minimum(output, deployment.max_model_len - prompt)
                run = engine.simulate(Workload(np.zeros(len(drawn)), prompt, tokens), deployment, max_log_steps=0)
                if run.requests.preemptions.any():
                    row[name] = batch
                    break
        found[model] = row | {"kv_tokens": deployment.kv.num_blocks * deployment.kv.block_size}
    return {"elis.preemption_batch": {"value": found["lam13"]["batch"], "by_model": found}}


def request_rates(shared: Path, _quick: bool) -> dict[str, Any]:
    """Return requests per second of Azure's traces (Section 3.4): mean, busiest minute, busiest day."""
    traces = shared / "data" / "traces"
    arrival_s = read_trace(traces / "azure_llm_2023_conv.csv.gz", sort=True).arrival_s
    minutes = np.bincount(((arrival_s - arrival_s[0]) // 60).astype(int))
    burst = json.loads(gzip.decompress((traces / "burstgpt_1_aggregates.json.gz").read_bytes()))
    days = [day["req"] / 86_400 for day in burst["daily"]]
    azure = {"mean": len(arrival_s) / np.ptp(arrival_s), "busiest minute": minutes.max() / 60}
    rates = {"Azure LLM inference 2023": azure, "BurstGPT": {"mean": np.mean(days), "busiest day": max(days)}}
    return {"elis.request_rate": {"value": max(azure["mean"], *days), "rates_rps": rates}}


def sentences(_shared: Path, _quick: bool) -> dict[str, Any]:
    """Return Figure 1 with MiniLM: 40 sentences about the weather against 40 about anything else, no content shared.

    The value is the mean distance of unit vectors from their group's centre, of the weather over the others;
    "separated" is how often a pair about the weather is more similar than another pair.
    """
    encoder, found, pairs = SentenceEncoder(_predict.installed_encoder()), {}, []
    for name, group in zip(("similar", "unrelated"), SENTENCES.read_text("utf-8").split("\n\n"), strict=True):
        vectors = encoder.embed(group.splitlines(), 64, 0).astype(float)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        pairs.append((vectors @ vectors.T)[np.triu_indices(len(vectors), 1)])
        distance = float(np.linalg.norm(vectors - vectors.mean(axis=0), axis=1).mean())
        found[name] = {"sentences": len(vectors), "cosine": float(pairs[-1].mean()), "distance": distance}
    spread = found["similar"]["distance"] / found["unrelated"]["distance"]
    return {"elis.sentences": {"value": spread, "separated": float((pairs[0][:, None] > pairs[1]).mean()), **found}}
