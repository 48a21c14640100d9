"""How fast compiled code reads cost tables, and how long each source takes to build them."""

import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import polars as pl
from _harness import Row, cpu_seconds, fresh_process, machine, parser, show, summary

from lengthwise import EngineLimits, _jit, catalog, cost
from lengthwise.cost import _lookup
from lengthwise.engine.step_time import CostReader
from lengthwise.schema.deployment import Parallelism

ROOFLINE = (
    catalog.model("llama-2-70b"),
    catalog.gpu("A100-80GB"),
    catalog.node("a100_pairwise_nvlink"),
    Parallelism(tp=4),
    EngineLimits(max_num_seqs=256, max_num_batched_tokens=512),
    4096,
)


def step_times(tables, decodes, kv_tokens, chunks, contexts, out):
    """Write the iteration time of many different steps: every table is read, as in the kernel."""
    for i in range(len(out)):
        prompts = 1 if chunks[i] > 0 else 0
        tokens, seqs = decodes[i] + chunks[i], decodes[i] + prompts
        layer = _lookup.row(tables.by_tokens, tables.tokens_slope, tokens, 0)
        layer += _lookup.row(tables.by_tokens, tables.tokens_slope, tokens, 1)
        if prompts:
            layer += _lookup.prefill_attention(tables, chunks[i], contexts[i])
        layer += _lookup.decode_attention(tables, decodes[i], kv_tokens[i], prompts)
        out[i] = (
            tables.stage_layers[0] * layer
            + _lookup.row(tables.by_tokens, tables.tokens_slope, tokens, 2)
            + _lookup.row(tables.by_seqs, tables.seqs_slope, seqs, 0)
            + _lookup.row(tables.by_seqs, tables.seqs_slope, seqs, 1)
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
    """Return a row of the wall times of builds."""
    details |= {"machine": machine()}
    return Row(f"cost.{name}_s", unit="s", target=target, better="lower", details=details, **summary(seconds))


def roofline_build(repeats: int) -> Row:
    """Measure the wall time to build tables from the roofline."""
    times_s = [perf_counter()]
    for _ in range(repeats):
        assert np.isfinite(cost.roofline(*ROOFLINE).decode_s).all()
        times_s.append(perf_counter())
    return build("roofline_build", np.diff(times_s).tolist(), 0.3)


# Tables from a profile as Vidur has for Llama-2-70B: 1,044 rows of operators, 29,000 of attention, 4,500 of collectives
TOKENS = np.concatenate([[1, 2, 4], np.arange(8, 1025, 8), np.arange(1040, 2049, 16), np.arange(2080, 4097, 32)])
OPERATORS = {  # milliseconds at 4,096 tokens on one GPU
    "emb": 0.2, "input_layernorm": 0.1, "attn_pre_proj": 3.2, "attn_rope": 0.08, "attn_kv_cache_save": 0.02,
    "attn_post_proj": 2.6, "post_attention_layernorm": 0.1, "mlp_up_proj": 15.0, "mlp_act": 0.5,
    "mlp_down_proj": 7.5, "add": 0.06,
}  # fmt: skip
SHAPE = {"n_head": 64, "n_kv_head": 8, "n_embd": 8192, "n_expanded_embd": 28672, "vocab_size": 32768}


class MadeProfile:
    """A profiling folder in Vidur's layout and size, from a roofline with 3 % noise."""

    def __init__(self, folder: Path) -> None:
        self.rng = np.random.default_rng(0)
        place = folder / "compute/a100/meta-llama/Llama-2-70b-hf"
        network = folder / "network/a100_pairwise_nvlink"
        place.mkdir(parents=True)
        network.mkdir(parents=True)
        pl.concat([self._operators(tp) for tp in (1, 2, 4, 8)]).write_csv(place / "mlp.csv")
        pl.concat([self._attention(tp) for tp in (2, 4)]).write_csv(place / "attention.csv")
        pl.concat([self._network("all_reduce", tp) for tp in (2, 4)]).write_csv(network / "all_reduce.csv")
        self._network("send_recv", 2).write_csv(network / "send_recv.csv")

    def _noisy(self, milliseconds: np.ndarray) -> np.ndarray:
        return np.round(milliseconds * self.rng.lognormal(0, 0.03, milliseconds.shape), 3)

    def _operators(self, tp: int) -> pl.DataFrame:
        times = {
            f"time_stats.{name}.median": self._noisy(0.01 + full / tp * np.maximum(TOKENS, 96) / 4096)
            for name, full in OPERATORS.items()
        }
        shape = {name: pl.lit(value) for name, value in SHAPE.items()}
        frame = pl.DataFrame({**times, "num_tokens": TOKENS})
        return frame.with_columns(use_gated_mlp=True, num_tensor_parallel_workers=tp, **shape)

    def _attention(self, tp: int) -> pl.DataFrame:
        kv = np.concatenate([np.arange(32, 1025, 32), np.arange(1088, 4033, 64)])
        batch = np.concatenate([np.arange(1, 129), np.arange(136, 257, 8)])
        b, k = (a.ravel() for a in np.meshgrid(batch, kv))
        chunk, done = (a.ravel() for a in np.meshgrid(np.arange(64, 4097, 64), np.arange(0, 4096, 64)))
        fits = chunk + done <= 4096
        chunk, done = chunk[fits], done[fits]
        decode = self._noisy(0.012 + 4e-6 / tp * b * k)
        prefill = self._noisy(0.015 + 2e-7 / tp * chunk * (done + chunk / 2))
        columns = {
            "time_stats.attn_decode.median": [*decode, *[None] * len(chunk)],
            "time_stats.attn_prefill.median": [*[None] * len(b), *prefill],
            "batch_size": [*b, *np.ones_like(chunk)],
            "prefill_chunk_size": [*np.zeros_like(b), *chunk],
            "kv_cache_size": [*k, *done],
            "is_prefill": [*[False] * len(b), *[True] * len(chunk)],
        }
        shape = {"n_embd": 8192, "n_q_head": 64, "n_kv_head": 8, "block_size": 16, "num_tensor_parallel_workers": tp}
        return pl.DataFrame(columns).with_columns(**shape)

    def _network(self, name: str, workers: int) -> pl.DataFrame:
        size = np.unique(np.geomspace(2048, 2**29, 2248).astype(np.int64))
        frame = pl.DataFrame({f"time_stats.{name}.median": self._noisy(0.02 + size / 2e8), "size": size})
        return frame.with_columns(num_workers=workers, devices_per_node=workers, max_devices_per_node=4)


BUILD = """
import json, time
from lengthwise import EngineLimits, catalog, cost
from lengthwise.schema.deployment import Parallelism
start = time.perf_counter()
tables, fit = cost.vidur_profile({folder!r}, catalog.model("llama-2-70b"), "A100-80GB", Parallelism(tp=4),
    EngineLimits(max_num_seqs=256, max_num_batched_tokens=512), 4096, estimator={estimator!r}, cache={cache!r})
build_s = time.perf_counter() - start
print(json.dumps([build_s, float(tables.layer_s[512]), max(o.median_error for o in fit.operators)]))
"""


def vidur_build(estimator: str, suffix: str, repeats: int) -> list[Row]:
    """Measure builds into an empty cache, then from it, each in a process of its own; imports do not count."""
    cold_s, warm_s = [], []
    with tempfile.TemporaryDirectory() as scratch:
        MadeProfile(Path(scratch) / "profiling")
        for i in range(repeats):
            code = BUILD.format(folder=f"{scratch}/profiling", estimator=estimator, cache=f"{scratch}/cache{i}")
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
    """Measure and print all figures."""
    args = parser(__doc__).parse_args()
    repeats = 2 if args.quick else 5
    rows = [lookups(1_000_000 if args.quick else 5_000_000, repeats), roofline_build(repeats)]
    rows += vidur_build("monotone", "", repeats)
    rows += vidur_build("random_forest", "_forest", 1 if args.quick else 2)
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
