"""How fast compiled code reads cost tables, and how long Vidur's recorded profile takes to become tables."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _harness import cpu_seconds, fresh_process, machine, summary
from _sections import Sections

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


def lookups(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return step times per second; they equal those of the plain reader."""
    count, built, rng = 1_000_000 if quick else 5_000_000, cost.roofline(*ROOFLINE), np.random.default_rng(0)
    decodes = rng.integers(1, 257, count)
    kv_tokens = decodes * rng.integers(1, 4000, count)
    chunks = np.where(rng.random(count) < 0.5, 0, rng.integers(1, 257, count))
    contexts, out = rng.integers(0, 3800, count), np.empty(count)
    columns = (_lookup.pack(built), decodes, kv_tokens, chunks, contexts, out)
    compiled = _jit.compile_now(step_times, _jit.none(*map(_jit.type_of, columns)), cached=False)
    rates = summary([count / seconds for seconds in cpu_seconds(lambda: compiled(*columns), 2 if quick else 5)])
    reader = CostReader(built)
    for i in range(200):
        prompts = [(int(chunks[i]), int(contexts[i]))] if chunks[i] else []
        plain = sum(reader.step(int(decodes[i]), int(kv_tokens[i]), prompts).stages_s)
        assert abs(plain - out[i]) <= 1e-12 * plain, (i, plain, out[i])
    return {"cost.lookups_per_s": rates | {"machine": machine()}}


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


def vidur(shared: Path, quick: bool, estimator: str, name: str) -> dict[str, Any]:
    """Return seconds of builds into an empty cache, then from it, each in a process of its own, without imports."""
    folder, cold_s, warm_s = shared / "data/profiles/vidur", [], []
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(2 if quick else 5):
            code = BUILD.format(folder=str(folder), estimator=estimator, cache=f"{scratch}/{i}")
            (cold, layer_s, worst), (warm, stored_layer_s, _) = fresh_process(code), fresh_process(code)
            assert stored_layer_s == layer_s, "a stored table differs from the built one"
            assert worst < 0.1, "the fit does not follow its own profile"
            cold_s.append(cold)
            warm_s.append(warm)
    builds, details = {"cold": cold_s, "warm": warm_s}, {"estimator": estimator, "machine": machine()}
    return {f"cost.{name}_build_{kind}_s": summary(seconds) | details for kind, seconds in builds.items()}


SECTIONS = Sections("cost", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
