"""ExeGPT's lengths (sections 6 and 7.1) and memory (Figure 9)."""

import math
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import exegpt as ex
import numpy as np
from _exegpt_checks import compared
from _harness import RECORDED
from simulated_schedules import correlated as pairs

from lengthwise.catalog import weight_bytes
from lengthwise.schedule import Strategy
from lengthwise.schedule.controls import waa_layout
from lengthwise.schedule.estimation import resident_batches
from lengthwise.schedule.stage_costs import stage_memory

# Section 7.1: distributions and correlation of lengths
DATA = RECORDED["lengths"]
FAMILIES = ("truncated normal", "normal", "log-normal", "skew normal")
FITTED = 4000
"""Requests of a data set at most that distributions are fitted to."""


def fits(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the share of columns of lengths that a truncated normal distribution fits best, and correlations."""
    from scipy.stats import spearmanr

    records, best = [], []
    for name, (file, *keys) in list(DATA.items())[: 2 if quick else None]:
        both = np.array(ex.read_lengths(shared / "data" / file, *keys))
        both = both[:, both.min(axis=0) >= 1]
        correlation, half = float(np.corrcoef(both)[0, 1]), 1.96 / math.sqrt(both.shape[1] - 3)  # Fisher's z
        ends = [math.tanh(math.atanh(correlation) + side) for side in (-half, half)]
        record = {"data set": name, "requests": both.shape[1], "correlation": correlation, "95 % interval": ends}
        record["rank correlation"] = float(spearmanr(*both).statistic)
        for side, tokens in zip(("prompts", "outputs"), both, strict=True):
            drawn = np.random.default_rng(0).permutation(tokens)[:FITTED].astype(float)
            distances = {family: _distance(family, drawn) for family in FAMILIES}
            best.append(min(distances, key=distances.__getitem__))
            cell = f"{best[-1]}, {distances[best[-1]]:.3f} ({distances['truncated normal']:.3f})"
            record[f"best fit of {side}, its distance (of the truncated normal)"] = cell
        records.append(record)
    counts = {family: best.count(family) for family in FAMILIES}
    share = {"value": counts["truncated normal"] / len(best), "unit": "share", "best": counts, "records": records}
    return {"exegpt.truncated_normal_share": share}


def _distance(family: str, tokens: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov distance of tokens from the family's distribution of highest likelihood."""
    from scipy import optimize, stats

    def cost(point: np.ndarray) -> float:
        scaled = stats.norm(point[0], math.exp(point[1]))
        return float(scaled.logsf(0) - scaled.logpdf(tokens).mean())

    if family == "truncated normal":  # below zero, as in the paper
        mean, log_sd = optimize.minimize(cost, [tokens.mean(), math.log(tokens.std())], method="Nelder-Mead").x
        fitted = stats.truncnorm(-mean / math.exp(log_sd), math.inf, mean, math.exp(log_sd))
    else:
        of = {"normal": stats.norm, "log-normal": stats.lognorm, "skew normal": stats.skewnorm}[family]
        fitted = of(*of.fit(tokens, **({"floc": 0} if family == "log-normal" else {})))
    return float(stats.kstest(tokens, fitted.cdf).statistic)


# Section 6: prompts and outputs that correlate, in random order and with similar requests one after another
CORRELATIONS, COUNT, SEEDS = (0.0, 0.57, 0.94), 40_000, 3
"""Correlations of the paper's translation data sets, and none; requests of a simulation, and simulations."""


def correlated(_: Path, quick: bool) -> dict[str, Any]:
    """Return the largest error of estimates, which assume no correlation, by order of the requests."""
    of, records = ex.estimator(ex.OPT, "t"), []
    bound_s = ex.bounds_s(ex.faster_transformer(of))[2]
    largest = {"random": 0.0, "similar in a row": 0.0}
    for strategies, correlation, order in product(((Strategy.RRA,), ex.WAA), CORRELATIONS, largest):
        choice = ex.chosen(ex.planner(of, strategies), bound_s)
        record = {"schedule": choice.row.words, "correlation": correlation, "order": order}
        draw = partial(pairs, of.setting.task, correlation, COUNT, mixed=order == "random")
        found = [compared(of, choice.controls, draw(seed)) for seed in range(1 if quick else SEEDS)]
        for name, title in {"rps": "throughput", "latency": "latency of the longest"}.items():
            errors = [100 * one[f"{name}_error"] for one in found]
            record[f"error, {title}, %"] = [min(errors), max(errors)]
            largest[order] = max(largest[order], *(abs(error) / 100 for error in errors))
        records.append(record)
    value = {"value": largest["random"], "unit": "relative", "better": "lower"}
    return {"exegpt.correlated_error_max": value | {"by_order": largest, "records": records}}


# Figure 9: memory without a latency bound
def memory(_: Path, quick: bool) -> dict[str, Any]:
    """Return a row per model: its second copy under WAA, as a share of all memory that FasterTransformer uses."""
    rows = {}
    for served in (ex.OPT,) if quick else (ex.OPT, ex.GPT101):
        records, shares = [], []
        for task in ("t", "g"):
            of = ex.estimator(served, task)
            setting, lengths, load = of.setting, of.setting.task, of.setting.phase(1, renewal=True)
            token_bytes = stage_memory(setting.model, setting.cluster, 1).kv_layer_bytes * setting.model.layers
            static, row = ex.faster_transformer(of).best(math.inf), ex.chosen(ex.planner(of, ex.WAA), math.inf).row
            layout = waa_layout(setting.model.layers, served.gpus, row.prefill_gpus, row.tp, row.tp_groups)
            batches = resident_batches(setting.model, len(layout.prefill))
            cached = row.decode_batch * load.kv_tokens[0] / load.seqs[0]
            reserved = static.prefill_batch * (lengths.mean_prompt_tokens + lengths.max_output_tokens)
            parts = {
                "FasterTransformer": (static.words, served.gpus, reserved),
                "WAA, prefill": (row.words, row.prefill_gpus, batches * row.prefill_batch * lengths.mean_prompt_tokens),
                "WAA, decode": (row.words, served.gpus - row.prefill_gpus, cached),
            }
            model_gib = weight_bytes(setting.model) / 2**30
            for system, (schedule, gpus, tokens) in parts.items():
                cache_gib = float(tokens * token_bytes) / 2**30
                sizes = {"model, GiB": model_gib, "cache, GiB": cache_gib, "a GPU, GiB": (model_gib + cache_gib) / gpus}
                about = {"model": served.name, "task": task.upper(), "system": system, "GPUs": gpus}
                records.append(about | sizes | {"schedule": schedule})
            shares.append(model_gib / (model_gib + reserved * token_bytes / 2**30))
        rows[f"exegpt.memory.{served.name}"] = {"value": fmean(shares), "unit": "share", "records": records}
    return rows
