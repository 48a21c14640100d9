"""What SamuLLM's cost model assumes (section 2), on recorded outputs, runs and kernels; the numbers of docs/apps.md."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import mean, stdev
from unittest import mock

import numpy as np
import pytest

from lengthwise import catalog, engine, simulate
from lengthwise.gateway.length_prediction.learning import kolmogorov_smirnov
from lengthwise.measure import read_records
from lengthwise.schema.workload import Workload

BURSTS = Path(__file__).parents[2] / "benchmarks" / "results" / "live" / "transformers"
BLOCKS = DRAWS = 20


def near(value, rel=0.02):
    return pytest.approx(value, rel=rel)


# Figure 2: are distributions of output length alike, whatever the request?


def distance(tokens, by, of):
    """The largest distance of the distribution functions of two ``of`` within one ``by``, mean over all pairs."""
    parts = ([tokens[(by == one) & (of == other)] for other in np.unique(of)] for one in np.unique(by))
    return mean(kolmogorov_smirnov(*pair) for some in parts for pair in itertools.combinations(some, 2))


@pytest.fixture(scope="module")
def outputs(shared):
    """Tokens, models and prompts (by number) of 24 models on AlpacaEval; tokens and source of each prompt."""
    import _texts

    text = shared("data/text")
    samples = _texts.alpaca_eval(text)
    source = {row["instruction"]: row["dataset"] for row in _texts.lines(text / "nc_alpaca_eval/instructions.jsonl.gz")}
    prompts, number = np.unique(samples.prompts.text, return_inverse=True)
    size = np.zeros(len(prompts))
    size[number] = samples.prompts.prompt_tokens
    return samples.output_tokens, np.array(samples.prompts.model), number, size, np.array([source[p] for p in prompts])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "groups_distance", "half_width", "models_distance", "by_chance"),
    [("prompt length", 0.137, 0.055, 0.350, 0.094), ("source", 0.250, 0.078, 0.391, 0.110)],
)
def test_distributions_differ_less_between_prompt_lengths_than_between_models(
    outputs, group, groups_distance, half_width, models_distance, by_chance
):
    """Quartiles of prompt length are near chance; sources of prompts differ more than half as much as models do.

    Both distances are of groups of the same sizes. The interval of their ratio leaves out a twentieth of the prompts in
    turn.
    """
    tokens, model, number, size, source = outputs
    rng = np.random.default_rng(0)
    groups = source if group == "source" else np.searchsorted(np.quantile(size, [0.25, 0.5, 0.75]), size)
    columns = tokens, model, groups[number]
    assert distance(*columns) == near(groups_distance)
    assert distance(tokens, columns[2], model) == near(models_distance)
    assert mean(distance(tokens, model, rng.permutation(groups)[number]) for _ in range(BLOCKS)) == near(
        by_chance, 0.05
    )
    block, ratios = (np.random.default_rng(1).permutation(len(size)) % BLOCKS)[number], []
    for k in range(BLOCKS):
        tokens_left, model_left, group_left = (column[block != k] for column in columns)
        ratios.append(distance(tokens_left, model_left, group_left) / distance(tokens_left, group_left, model_left))
    assert 1.96 * stdev(ratios) * (BLOCKS - 1) / BLOCKS**0.5 == near(half_width, 0.1)


@pytest.mark.slow
def test_within_one_source_prompt_length_is_close_to_chance(outputs):
    tokens, model, number, size, source = outputs
    rng, own = np.random.default_rng(0), (source == "selfinstruct")
    groups = np.searchsorted(np.quantile(size[own], [0.25, 0.5, 0.75]), size)
    rows = own[number]
    assert distance(tokens[rows], model[rows], groups[number][rows]) == near(0.200)
    shuffled = groups.copy()
    by_chance = []
    for _ in range(BLOCKS):
        shuffled[own] = rng.permutation(groups[own])
        by_chance.append(distance(tokens[rows], model[rows], shuffled[number][rows]))
    assert mean(by_chance) == near(0.161, 0.05)


# Figure 3: running requests, real and simulated


def running(steps):
    return steps.decode_seqs + steps.prefill_seqs


def difference(real, own):
    """The mean absolute difference over the mean of the real course; the shorter one goes on at 0."""
    both = np.array(list(itertools.zip_longest(real, own, fillvalue=0)))
    return float(np.abs(both[:, 0] - both[:, 1]).mean() / np.mean(real))


def test_iterations_of_a_real_engine_run_the_simulated_requests():
    """Bursts of 100 requests: known lengths give every iteration; sampled ones the course, as in the paper's figure."""
    import _live

    plan, rng = _live.FULL, np.random.default_rng(0)
    sizes = (plan.max_model_len, plan.blocks, plan.dtype)
    deployment = plan.fifo.deployment(str(BURSTS / "small.json"), catalog.gpu("A100-80GB"), *sizes)  # time is no matter
    others = read_records(BURSTS / "fifo-half-0.measured.parquet").workload.output_tokens
    errors = []
    for path in sorted(BURSTS.glob("fifo-static-*.measured.parquet")):
        run = read_records(path)
        workload, real = run.workload, running(run.records.steps)
        assert len(real) == 173
        assert (running(simulate(workload, deployment).steps) == real).all()
        for _ in range(DRAWS):
            sampled = Workload(workload.arrival_s, workload.prompt_tokens, rng.choice(others, len(workload)))
            errors.append(difference(real, running(simulate(sampled, deployment).steps)))
    assert len(errors) == 3 * DRAWS
    assert mean(errors) == near(0.143)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "known", "sampled"),
    [(0, 0.0581, 0.0957), (1, 0.0222, 0.0262), (2, 0.0109, 0.0145)],
    ids=["rtx4090", "rtxpro6000", "rtxpro6000-tp2"],
)
def test_gpus_run_the_simulated_number_of_requests(shared, number, known, sampled):
    """By second, as vLLM reports it; lengths are sampled from those of the run."""
    import _recorded

    run, root, rng = _recorded.RUNS[number], shared("data").parent, np.random.default_rng(0)
    folder = root / _recorded.ROOT / "measured_runs" / run.folder
    r, deployment = _recorded.read_run(root, run).workload, _recorded.deployment(root, run)
    head, *lines = (line.split(",") for line in _recorded.text(folder / "vllm" / "timeseries.csv").splitlines())
    real, errors = [int(line[head.index("running")]) for line in lines], []
    for draw in range(1 + DRAWS):
        output = rng.choice(r.output_tokens, len(r)) if draw else r.output_tokens
        steps = simulate(Workload(r.arrival_s, r.prompt_tokens, output), deployment).steps
        at_s = np.arange(1.0, max(len(real), steps.end_s[-1]) + 1)
        errors.append(difference(real, np.append(running(steps), 0)[np.searchsorted(steps.end_s, at_s)]))
    assert errors[0] == near(known)
    assert mean(errors[1:]) == near(sampled, 0.1)


# Figure 4: times that are linear for each number of requests


def left_out(x, y):
    """Relative errors at each inner point of the line through the others, of least relative squares."""
    order, found = np.argsort(x), []
    for i in order[1:-1]:
        rest = np.delete(np.arange(len(x)), i)
        line = np.polyfit(x[rest], y[rest], 1, w=1 / y[rest])
        found.append(abs(float(np.polyval(line, x[i])) / y[i] - 1))
    return found


@pytest.mark.parametrize(
    ("number", "decode", "prefill", "sampler"),
    [
        (0, (0.0069, 0.0299), (0.119, 0.304), (0.160, 0.427)),
        (1, (0.0074, 0.0354), (0.082, 0.195), (0.095, 0.279)),
        (2, (0.0075, 0.0328), (0.084, 0.199), (0.104, 0.307)),
    ],
    ids=["rtx4090", "rtxpro6000", "rtxpro6000-tp2"],
)
def test_decode_iterations_are_linear_in_their_flops_for_each_number_of_requests(
    shared, number, decode, prefill, sampler
):
    """Mean and largest error of a line at points that it has not seen: kernels of vLLM 0.19, times the layers.

    Decode: a line for each number of requests (Equation 2: linear in KV tokens). Prefill: of one request (Equation 1).
    The sampler depends on the number of requests alone.
    """
    import _recorded
    import polars as pl

    run = _recorded.RUNS[number]
    model, place = catalog.model(run.model), shared(f"{_recorded.ROOT}/v1/{run.kernels}/bf16/tp{run.tp}")
    attention, dense, head = (
        pl.read_csv(next(place.glob(f"{name}.csv*"))) for name in ("attention", "dense", "per_sequence")
    )
    layer_us = dict(dense.group_by("tokens").agg(pl.col("time_us").sum()).iter_rows())
    head_us = dict(head.group_by("sequences").agg(pl.col("time_us").sum()).iter_rows())
    errors = []
    for (n,), rows in attention.filter(pl.col("prefill_chunk") == 0).group_by("n_decode", maintain_order=True):
        kv_tokens, time_us = rows["kv_decode"].to_numpy(), rows["time_us"].to_numpy()
        errors += left_out(kv_tokens, model.layers * (time_us + layer_us[n]) + head_us[n])
    assert (mean(errors), max(errors)) == near(decode, 0.05)
    one = attention.filter((pl.col("n_decode") == 0) & (pl.col("kv_prefill") == 0))
    one = one.filter(pl.col("prefill_chunk").is_in(list(layer_us)))
    s, time_us = one["prefill_chunk"].to_numpy(), one["time_us"].to_numpy()
    weights = (catalog.active_parameters(model) - 2 * catalog.embedding_parameters(model)) / model.layers
    flops = weights * s + 2 * model.hidden * s**2.0
    errors = left_out(flops, model.layers * (time_us + np.array([layer_us[n] for n in s])) + head_us[1])
    assert (mean(errors), max(errors)) == near(prefill, 0.05)
    rows = head.filter(pl.col("layer") == "sampler")
    errors = left_out(rows["sequences"].to_numpy(), rows["time_us"].to_numpy())
    assert (mean(errors), max(errors)) == near(sampler, 0.05)


# Section 4.2: simulations of the search


@pytest.mark.slow
def test_algorithm_1_needs_few_of_the_simulations_of_its_bound():
    """The paper makes V^2 N^2 simulations for V models on N GPUs, in parallel; runs are cached, and few are new."""
    import apps

    made = []
    for world in (apps.ensembling(1000, 256), apps.mixed(100, 5000, 256)):
        with mock.patch.object(engine, "simulate", wraps=engine.simulate) as simulated:
            world.plan(world.draws(1, 1), apps.GREEDY)
        made.append((simulated.call_count, (8 * len(world.models)) ** 2))
    assert made == [(392, 5184), (659, 7744)]
