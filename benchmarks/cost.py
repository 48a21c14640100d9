"""How fast cost tables are read by compiled code and built from each source."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from _harness import Row, arguments, best_cpu_s, fresh_process, machine, show
from _made_profile import make

from lengthwise import EngineLimits, _jit, catalog, cost
from lengthwise.cost import _lookup
from lengthwise.engine.step_time import CostReader
from lengthwise.schema.deployment import Parallelism

LIMITS = EngineLimits(max_num_seqs=256, max_num_batched_tokens=512)
PARALLEL = Parallelism(tp=4)
MODEL, GPU, NODE = (catalog.model("llama-2-70b"), catalog.gpu("A100-80GB"), catalog.node("a100_pairwise_nvlink"))


def step_times(tables, decodes, kv_tokens, chunks, contexts, out):
    """The iteration time of many different steps: every table read, as the kernel does."""
    for i in range(len(out)):
        tokens, seqs = decodes[i] + chunks[i], decodes[i] + (1 if chunks[i] > 0 else 0)
        layer = _lookup.row(tables.by_tokens, tables.tokens_slope, tokens, 0)
        layer += _lookup.row(tables.by_tokens, tables.tokens_slope, tokens, 1)
        if chunks[i] > 0:
            layer += _lookup.prefill_attention(tables, chunks[i], contexts[i])
        layer += _lookup.decode_attention(tables, decodes[i], kv_tokens[i])
        out[i] = (
            tables.stage_layers[0] * layer
            + _lookup.row(tables.by_tokens, tables.tokens_slope, tokens, 2)
            + _lookup.row(tables.by_seqs, tables.seqs_slope, seqs, 0)
            + _lookup.row(tables.by_seqs, tables.seqs_slope, seqs, 1)
        )


def lookups(count: int, repeats: int) -> Row:
    tables = _lookup.pack(cost.roofline(MODEL, GPU, NODE, PARALLEL, LIMITS, 4096))
    rng = np.random.default_rng(0)
    decodes = rng.integers(1, 257, count)
    kv_tokens = decodes * rng.integers(1, 4000, count)
    chunks = np.where(rng.random(count) < 0.5, 0, rng.integers(1, 257, count))
    contexts = rng.integers(0, 3800, count)
    out = np.empty(count)
    types = (_jit.type_of(a) for a in (tables, decodes, kv_tokens, chunks, contexts, out))
    fast = _jit.compile_now(step_times, _jit.none(*types), cached=False)
    fast(tables, decodes, kv_tokens, chunks, contexts, out)
    check(out, decodes, kv_tokens, chunks, contexts)
    median, all_s = best_cpu_s(lambda: fast(tables, decodes, kv_tokens, chunks, contexts, out), repeats)
    details = {"lookups": count, "with_prefill_share": 0.5, "machine": machine()}
    spread = (count / max(all_s), count / min(all_s))
    return Row("cost.lookups_per_s", count / median, "1/s", 1e7, "higher", spread, details)


def check(out, decodes, kv_tokens, chunks, contexts):
    """The compiled times are those of the plain reader."""
    reader = CostReader(cost.roofline(MODEL, GPU, NODE, PARALLEL, LIMITS, 4096))
    for i in range(200):
        prompts = [(int(chunks[i]), int(contexts[i]))] if chunks[i] else []
        plain = sum(reader.step(int(decodes[i]), int(kv_tokens[i]), prompts).stages_s)
        assert abs(plain - out[i]) <= 1e-12 * plain, (i, plain, out[i])


def roofline_build(repeats: int) -> Row:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        tables = cost.roofline(MODEL, GPU, NODE, PARALLEL, LIMITS, 4096)
        seconds.append(time.perf_counter() - start)
    assert np.isfinite(tables.decode_s).all()
    return Row(
        "cost.roofline_build_s",
        statistics.median(seconds),
        "s",
        0.3,
        "lower",
        (min(seconds), max(seconds)),
        {"machine": machine()},
    )


BUILD = """
import json, time
start = time.perf_counter()
from lengthwise import EngineLimits, catalog, cost
from lengthwise.schema.deployment import Parallelism
imported = time.perf_counter()
tables, fit = cost.vidur_profile({folder!r}, catalog.model("llama-2-70b"), "A100-80GB", Parallelism(tp=4),
    EngineLimits(max_num_seqs=256, max_num_batched_tokens=512), 4096, estimator={estimator!r}, cache={cache!r})
done = time.perf_counter()
worst = max(o.median_error for o in fit.operators)
out = dict(build_s=done - imported, import_s=imported - start, layer_s=float(tables.layer_s[512]), worst=worst)
print(json.dumps(out))
"""


def vidur_build(estimator: str, suffix: str, repeats: int) -> list[Row]:
    """Cold into an empty cache, then warm, each in a process of its own; imports apart."""
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = make(Path(scratch) / "profiling")
        for i in range(repeats):
            code = BUILD.format(folder=str(folder), estimator=estimator, cache=f"{scratch}/cache{i}")
            cold.append(fresh_process(code)["out"])
            warm.append(fresh_process(code)["out"])
            assert warm[-1]["layer_s"] == cold[-1]["layer_s"], "a stored table differs from the built one"
            assert cold[-1]["worst"] < 0.1, "the fit does not follow its own profile"
    rows = []
    for name, runs, target in (("cold", cold, 10.0), ("warm", warm, 0.2)):
        seconds = [run["build_s"] for run in runs]
        details = {
            "estimator": estimator,
            "import_s": runs[0]["import_s"],
            "profile": "made, Vidur's size",
            "machine": machine(),
        }
        middle, spread = statistics.median(seconds), (min(seconds), max(seconds))
        rows.append(Row(f"cost.vidur{suffix}_build_{name}_s", middle, "s", target, "lower", spread, details))
    return rows


def main() -> None:
    args = arguments(__doc__ or "")
    repeats = 2 if args.fast else 5
    rows = [lookups(1_000_000 if args.fast else 5_000_000, repeats), roofline_build(repeats)]
    rows += vidur_build("monotone", "", repeats)
    rows += vidur_build("random_forest", "_forest", 1 if args.fast else 2)
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
