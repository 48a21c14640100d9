"""How fast compiled code reads cost tables, and how long each source takes to build them.

Vidur's profile of Llama-2-70B is read from the folder of recorded data.
"""

import sys
import tempfile
import timeit
from pathlib import Path

import numpy as np
from _harness import Row, cpu_seconds, fresh_process, machine, parser, show, summary
from _sections import SHARED

from lengthwise import EngineLimits, _jit, catalog, cost
from lengthwise.cost import _lookup
from lengthwise.engine.step_time import CostReader
from lengthwise.schema.deployment import Parallelism

MODEL, GPU, NODE = catalog.model("llama-2-70b"), catalog.gpu("A100-80GB"), catalog.node("a100_pairwise_nvlink")
LIMITS = EngineLimits(max_num_seqs=256, max_num_batched_tokens=512)
ROOFLINE = (MODEL, GPU, NODE, Parallelism(tp=4), LIMITS, 4096)


def step_times(tables, decodes, kv_tokens, chunks, contexts, out):
    """Write the iteration time of many different steps: every table is read, as in the kernel."""
    for i in range(len(out)):
        prompts = 1 if chunks[i] > 0 else 0
        tokens, seqs = decodes[i] + chunks[i], decodes[i] + prompts
        layer = _lookup.entry(tables.by_tokens, tables.tokens_slope, tokens, 0)
        layer += _lookup.entry(tables.by_tokens, tables.tokens_slope, tokens, 1)
        if prompts:
            layer += _lookup.prefill_attention(tables, chunks[i], contexts[i])
        layer += _lookup.decode_attention(tables, decodes[i], kv_tokens[i], prompts)
        out[i] = (
            tables.stage_layers[0] * layer
            + _lookup.entry(tables.by_tokens, tables.tokens_slope, tokens, 2)
            + _lookup.entry(tables.by_seqs, tables.seqs_slope, seqs, 0)
            + _lookup.entry(tables.by_seqs, tables.seqs_slope, seqs, 1)
        )


def lookups(count: int, repeats: int) -> Row:
    """Measure step times per second; they equal those of the plain reader."""
    built, rng = cost.roofline(*ROOFLINE), np.random.default_rng(0)
    decodes = rng.integers(1, 257, count)
    kv_tokens = decodes * rng.integers(1, 4000, count)
    chunks = np.where(rng.random(count) < 0.5, 0, rng.integers(1, 257, count))
    contexts, out = rng.integers(0, 3800, count), np.empty(count)
    columns = (_lookup.pack(built), decodes, kv_tokens, chunks, contexts, out)
    compiled = _jit.compile_now(step_times, _jit.none(*map(_jit.type_of, columns)), cached=False)
    rates = summary([count / seconds for seconds in cpu_seconds(lambda: compiled(*columns), repeats)])
    reader = CostReader(built)
    for i in range(200):
        prompts = [(int(chunks[i]), int(contexts[i]))] if chunks[i] else []
        plain = sum(reader.step(int(decodes[i]), int(kv_tokens[i]), prompts).stages_s)
        assert abs(plain - out[i]) <= 1e-12 * plain, (i, plain, out[i])
    details = {"machine": machine()}
    return Row("cost.lookups_per_s", unit="1/s", target=1e7, better="higher", details=details, **rates)


def build(name: str, seconds: list[float], target: float, **details: object) -> Row:
    details |= {"machine": machine()}
    return Row(f"cost.{name}_s", unit="s", target=target, better="lower", details=details, **summary(seconds))


BUILD = """
import json, time
import polars
from lengthwise import EngineLimits, catalog
from lengthwise.cost import vidur_profile
from lengthwise.schema.deployment import Parallelism
start = time.perf_counter()
tables, fit = vidur_profile({folder!r}, catalog.model("llama-2-70b"), "A100-80GB", Parallelism(tp=4),
    EngineLimits(max_num_seqs=256, max_num_batched_tokens=512), 4096, estimator={estimator!r}, cache={cache!r})
build_s = time.perf_counter() - start
print(json.dumps([build_s, float(tables.layer_s[512]), max(o.median_error for o in fit.operators)]))
"""


def vidur_build(folder: Path, estimator: str, suffix: str, repeats: int) -> list[Row]:
    """Measure builds into an empty cache, then from it, each in a process of its own; imports do not count."""
    cold_s, warm_s = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(repeats):
            code = BUILD.format(folder=str(folder), estimator=estimator, cache=f"{scratch}/{i}")
            (cold, layer_s, worst), (warm, stored_layer_s, _) = fresh_process(code), fresh_process(code)
            assert stored_layer_s == layer_s, "a stored table differs from the built one"
            assert worst < 0.1, "the fit does not follow its own profile"
            cold_s.append(cold)
            warm_s.append(warm)
    return [
        build(f"vidur{suffix}_build_cold", cold_s, 10.0, estimator=estimator),
        build(f"vidur{suffix}_build_warm", warm_s, 0.2, estimator=estimator),
    ]


def main() -> None:
    args = parser(__doc__).parse_args()
    repeats = 2 if args.quick else 5
    assert np.isfinite(cost.roofline(*ROOFLINE).decode_s).all()
    roofline_s = timeit.repeat(lambda: cost.roofline(*ROOFLINE), number=1, repeat=repeats)
    rows = [lookups(1_000_000 if args.quick else 5_000_000, repeats), build("roofline_build", roofline_s, 0.3)]
    if (folder := SHARED / "data/profiles/vidur").is_dir():
        rows += vidur_build(folder, "monotone", "", repeats)
        rows += vidur_build(folder, "random_forest", "_forest", 1 if args.quick else 2)
    else:
        print(f"cost.vidur_build: no folder {folder}", file=sys.stderr)
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
