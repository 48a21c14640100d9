"""ELIS' evaluation (Table 5, Figures 5 and 6) repeated in simulation, and how much more is possible.

Five models on one A100-80GB, batches of 1, 2 and 4, 1x, 3x and 5x the rate of one request after the other, Gamma
arrivals of shape 0.73, 200 prompts in three shuffles. Prompts are AlpacaEval's (non-commercial: for evaluation,
never for training), outputs those of the same model or its nearest relative there (``MODELS``). Which policy is
"own" is chosen on 200 other prompts of the set."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Self

import _texts
import numpy as np
import numpy.typing as npt

from lengthwise import engine, policy, predict, search, workload
from lengthwise.lab import Contestant, Question, lab
from lengthwise.predict import LengthDistribution, Prompts, Samples
from lengthwise.predict.distribution import LEVELS
from lengthwise.predict.encoder import SentenceEncoder, encoder_folder
from lengthwise.predict.features import prompt_features
from lengthwise.predict.lexical import Lexical
from lengthwise.schema.deployment import Deployment, EngineLimits, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.lab import LabTable, LoadUnit
from lengthwise.schema.workload import Workload
from lengthwise.statistics import t_half_width

FOLDER = "data/text/nc_alpaca_eval"
MODELS = {  # name in the paper: (catalog, whose outputs)
    "opt6.7": ("opt-6.7b", "alpaca-7b"),
    "opt13": ("opt-13b", "falcon-7b-instruct"),
    "lam7": ("llama-2-7b", "llama-2-7b-chat-hf"),
    "lam13": ("llama-2-13b", "llama-2-70b-chat-hf"),
    "vic": ("vicuna-13b", "vicuna-13b-v1.3"),
}
LOADS, BATCHES = (1.0, 3.0, 5.0), (1, 2, 4)
PROMPTS, SHUFFLES, SHAPE = 200, 3, 0.73
GPU = "A100-80GB"
RETAINED, PREEMPTIVE = "ours (seats kept)", "ours (seats change hands)"
IMPROVEMENT = "worth(factor=1)"
OTHERS = {"ELIS ISRTF": "elis", "SRTF": "srtf", "Gittins": "gittins", "HRRN": "hrrn"}
HEADLINE = "blend"
R2S = (0.4, 0.85)
WAITS = (0.9, 1.0, 1.2, 1.4, 2.0)
"""Bounds on waiting, in 99th percentiles of JCT under FCFS at the same load."""
AGES = (5.0,)  # tokens by which a second of age makes a request shorter
PAPER = (  # Table 5, batch 4: FCFS, ISRTF, SJF
    (77.83, 73.57, 20.35), (116.46, 98.74, 43.63), (118.13, 118.11, 43.63), (45.08, 50.52, 13.21),
    (83.42, 72.33, 24.62), (73.93, 74.41, 31.91), (93.42, 73.43, 32.34), (134.96, 118.22, 58.39),
    (144.23, 131.38, 60.98), (240.25, 212.60, 70.55), (350.55, 352.53, 133.11), (451.59, 377.29, 125.59),
    (91.28, 130.71, 37.02), (229.64, 200.34, 59.37), (251.66, 234.08, 89.64),
)  # fmt: skip
Tables = dict[str, LabTable]
"""By model."""


@dataclass(frozen=True)
class Text:
    prompt: str
    prompt_tokens: int
    output: str
    output_tokens: int


@lru_cache(maxsize=16)
def texts(shared: Path, outputs: str, *, tuning: bool = False) -> list[Text]:
    """Return the sampled prompts of one model, the same for every shuffle; for tuning others than are evaluated."""
    tokens = "n_tok_tekken131k"

    def sampled(name: str, seed: int = 0, without: Collection[int] = ()) -> list[dict[str, Any]]:
        rows = _texts.lines(shared / FOLDER / "outputs" / f"{name}.jsonl.gz")
        rows = [row for row in rows if row[tokens] > 0 and row["idx"] not in without]
        return [rows[i] for i in np.random.default_rng(seed).choice(len(rows), PROMPTS, replace=False)]

    prompts = {row["idx"]: row for row in _texts.lines(shared / FOLDER / "instructions.jsonl.gz")}
    rows = sampled(outputs)
    if tuning:
        rows = sampled(outputs, 1, {row["idx"] for _, name in MODELS.values() for row in sampled(name)})
    found = ((prompts[row["idx"]], row) for row in rows)
    return [Text(one["instruction"], one[tokens], row["output"], row[tokens]) for one, row in found]


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
        order = [known[i] for i in rng.permutation(len(known))]
        prompt = np.array([text.prompt_tokens for text in order], np.int64)
        output = np.array([text.output_tokens for text in order], np.int64)
        columns = {of: np.array([getattr(text, of) for text in order], object) for of in ("prompt", "output")}
        columns["model"] = np.array([outputs] * len(order), object)
        gaps_s = workload.Gamma(1.0, SHAPE**-0.5).sample(len(order), rng)
        made = Workload(gaps_s, prompt, np.minimum(output, max_tokens - prompt), extra=columns, name=outputs)
        if not predictor:
            return made
        which, options = self.predictors[predictor]
        return predict.attach(made, which, seed=seed, **options)

    def deployment(self, scheduler: Scheduler, batch: int) -> Deployment:
        limits = EngineLimits(max_num_seqs=batch)
        return engine.deploy(MODELS[self.model][0], GPU, limits=limits, scheduler=scheduler)


def predictors(shared: Path, model: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return predictors by name, with the statistic of the distribution that policies use (``predict.attach``)."""
    text, outputs = shared / "data" / "text", MODELS[model][1]
    learnt, lexical = _texts.oasst(text), predict.default()
    spread = float(np.std(np.log([t.output_tokens for t in texts(shared, outputs)])))
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "oracle": (predict.Oracle(), {}),
        "constant": (predict.Same(float(learnt.output_tokens.mean())), {}),
        "ecdf, survival": (predict.Conditional(predict.Ecdf().fit(learnt)), {}),
        "default": (lexical, {}),
        "default, median": (lexical, {"statistic": "median"}),
        HEADLINE: (trained_blend(text), {"statistic": "median"}),
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
        ages = AGES if others else ()
        made += [Contestant(f"{name}, aged {w:g}", replace(scheduler, rank=f"aged(weight={w:g})")) for w in ages]
    return tuple(made)


def tables(shared: Path, shuffles: int, *, tuning: bool, quick: bool) -> Tables:
    """Return a laboratory per model: every policy and predictor; for tuning only own policies, on other prompts."""
    engine.warm_up()
    made = {}
    for model in list(MODELS)[: 2 if quick else None]:
        known = predictors(shared, model)
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
        return float(f"{np.mean([c[metric].value for c in some]):.6g}")

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
    if not (shared / FOLDER).is_dir():
        raise FileNotFoundError(f"no folder {shared / FOLDER}")
    tuning = tables(shared, SHUFFLES - 1, tuning=True, quick=quick)
    evaluated = tables(shared, SHUFFLES, tuning=False, quick=quick)
    names = list(dict.fromkeys(c.predictor for t in evaluated.values() for c in t.cells if c.predictor))
    near = {name: chosen(frontier(tuning, name), "p99_over_oracle", 1.05) for name in names}
    fair = {name: chosen(frontier(tuning, name), "p99_over_fcfs", 1.15) for name in names}

    def of(policy_name: str, predictor: str) -> dict[str, Any]:
        return {"policy": policy_name, **over_cells(evaluated, policy_name, predictor)}

    def headline(policy_name: str) -> dict[str, Any]:
        found = of(policy_name, HEADLINE)
        shares = {m: over_cells({m: t}, policy_name, HEADLINE)["gap_closed"] for m, t in evaluated.items()}
        shares["half_width"] = float(f"{t_half_width(list(shares.values()), 0.95):.2g}")
        about = {"predictor": HEADLINE, "trained_on": blend_description(), "by_model": shares}
        return found | {"value": found["gap_closed"]} | about

    by_predictor = {
        name: {
            "within 5 % of the oracle's P99": of(near[name], name),
            "within 15 % of FCFS' P99": of(fair[name], name),
            "seats kept, no bound": of(RETAINED, name),
            "seats change hands, no bound": of(PREEMPTIVE, name),
            "ELIS ISRTF": of("ELIS ISRTF", name),
        }
        for name in names
    }
    near_oracle = headline(near[HEADLINE])
    return {
        "elis.gap_closed": near_oracle,
        "elis.p99_over_oracle": {"value": near_oracle["p99_over_oracle"], "policy": near_oracle["policy"]},
        "elis.gap_closed_at_p99_115": headline(fair[HEADLINE]),
        "elis.by_predictor": by_predictor,
        "elis.frontier": {name: frontier(evaluated, name) for name in names},
        "elis.table5": table5(evaluated, near_oracle["policy"], HEADLINE),
        "elis.figure6": figure6(evaluated),
        "elis.paper": {"gap_closed": float(f"{np.mean([(f - i) / (f - s) for f, i, s in PAPER]):.3g}")},
    }


def table5(evaluated: Tables, own: str, predictor: str) -> dict[str, Any]:
    """Return mean JCT in seconds at batch 4: FCFS, ELIS' ISRTF, ours, SJF with known lengths."""
    policies = {"FCFS": ("fcfs", ""), "ISRTF": ("ELIS ISRTF", predictor), "own": (own, predictor)}
    policies["SJF"], made = ("oracle", "oracle"), {}
    for (model, table), load in itertools.product(evaluated.items(), LOADS):
        cells = {(c.policy, c.predictor): c["jct.mean"].value for c in table.at(max(BATCHES), load)}
        made[f"{model} {load:g}x"] = {name: cells[key] for name, key in policies.items()}
    return made


def figure6(evaluated: Tables) -> dict[str, float]:
    """Return by batch size and load the reduction of mean JCT from FCFS to ELIS' ISRTF, over models, in percent."""
    made = {}
    for batch, load in itertools.product(BATCHES, LOADS):
        cells = [c for t in evaluated.values() for c in t.at(batch, load)]
        ratios = [c["jct.mean/fcfs"].value for c in cells if (c.policy, c.predictor) == ("ELIS ISRTF", HEADLINE)]
        made[f"batch {batch}, {load:g}x"] = float(f"{100 * (1 - np.mean(ratios)):.3g}")
    return made


# The blend: predictors that learn from different sets err differently
Floats = npt.NDArray[np.float64]
LAYERS, HEAD_TOKENS, TAIL_TOKENS = 5, 80, 40
DECAY, _CLIP, _ROUNDS = 2000.0, 4.0, 5


class Sentences:
    """Ridge regression of a prompt's log length on its sentence vector and its lexical columns."""

    def fit(self, samples: Samples) -> Self:
        """Learn the lengths of prompts, corrected for the models' own lengths."""
        from sklearn.linear_model import Ridge

        prompts, prompt = np.unique([text.strip() for text in samples.prompts.text], return_inverse=True)
        _, model = np.unique(samples.prompts.model, return_inverse=True)
        y, wanted = np.log(samples.output_tokens.astype(float)), np.zeros(len(prompts))
        for _ in range(_ROUNDS):
            offset = np.bincount(model, y - wanted[prompt]) / np.bincount(model)
            wanted = np.bincount(prompt, y - offset[model]) / np.bincount(prompt)
        columns = _columns([str(text) for text in prompts])
        self.mean_, self.sd_ = columns.mean(axis=0), columns.std(axis=0) + 1e-6
        self.ridge_ = Ridge(alpha=DECAY).fit(self._standard(columns), wanted)
        return self

    def log_tokens(self, prompts: Prompts) -> Floats:
        return np.asarray(self.ridge_.predict(self._standard(_columns(list(prompts.text)))))

    def _standard(self, columns: Floats) -> Floats:
        return np.clip((columns - self.mean_) / self.sd_, -_CLIP, _CLIP)


class Blend:
    """The mean of predictions, each in units of its own spread; the distribution is that of the lexical ones.

    ``lexical``: fitted predictors that read output so far as well; ``sentences``: fitted ones of the prompt alone.
    """

    def __init__(self, lexical: list[Any], sentences: list[Sentences]) -> None:
        self.lexical, self.sentences = lexical, sentences

    def fit(self, samples: Samples) -> Self:
        """Learn the scale of every prediction; only the prompts of the samples count."""
        predictions = self._predictions(samples.prompts)
        self.mean_, self.sd_ = predictions.mean(axis=1, keepdims=True), predictions.std(axis=1, keepdims=True)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: Any = 0) -> LengthDistribution:
        """Return distributions of total lengths above ``tokens_so_far``."""
        so_far = np.broadcast_to(np.asarray(tokens_so_far, float), (len(prompts),))
        count, standard = len(self.lexical), (self._predictions(prompts) - self.mean_) / self.sd_
        # on the lexical predictors' scale: the difference of the mean of all from their mean
        added = (standard.mean(axis=0) - standard[:count].mean(axis=0)) * self.sd_[:count].mean()
        logs = []
        for one in self.lexical:
            total = one.predict(prompts, so_far.astype(np.int64)).given(so_far).at(LEVELS).tokens
            logs.append(np.log(np.maximum(total - so_far[:, None], 1.0)))
        return LengthDistribution.of(so_far[:, None] + np.exp(np.mean(logs, axis=0) + added[:, None]))

    def _predictions(self, prompts: Prompts) -> Floats:
        """Return [predictors, n] log lengths before the first token."""
        first = [np.log(one.predict(prompts).median) for one in self.lexical]
        return np.stack([*first, *(one.log_tokens(prompts) for one in self.sentences)])


@cache
def _encoder() -> SentenceEncoder:
    return SentenceEncoder(layers=LAYERS)


def _columns(prompts: list[str]) -> Floats:
    own, at = np.unique(prompts, return_inverse=True)
    read = [str(text) for text in own]
    return np.hstack([prompt_features(read)[0], _encoder().embed(read, HEAD_TOKENS, TAIL_TOKENS)])[at]


def _has_encoder() -> bool:
    try:
        return bool(encoder_folder())
    except InputError:
        return False


@cache
def trained_blend(text: Path) -> Blend:
    """Return the blend of ELIS' evaluation, trained without AlpacaEval; without an encoder the lexical ones alone."""
    known = _texts.alpaca_eval(text).prompts.text
    lexical = [predict.default(), Lexical().fit(_texts.wide(text))]
    sets = [_texts.oasst(text), _texts.instructions(text, "llamafactory_demo", "alpaca_en_demo")]
    sentences = [Sentences().fit(_texts.without(samples, known)) for samples in sets if _has_encoder()]
    return Blend(lexical, sentences).fit(_texts.without(_texts.arena_hard(text), known))


def blend_description() -> str:
    vectors = "ridge on sentence vectors (OASST multi-sample; alpaca_en_demo)"
    ridge = vectors if _has_encoder() else "no sentence encoder"
    return (
        "blend of: the shipped predictor (outputs of Open-Assistant's openly licensed models); Lexical on OASST, "
        f"Arena-Hard, ZeroEval, GPTeacher, alpaca_en_demo; {ridge}; scaled on Arena-Hard prompts; AlpacaEval unseen"
    )
