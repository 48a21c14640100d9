"""A profiling folder in Vidur's layout and size, generated from a roofline with 3 % noise.

The benchmark of building cost tables therefore needs no recorded data: 1,044 rows of token-level operators, about
29,000 of attention and 4,500 of collectives, as Vidur has for Llama-2-70B.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

TOKENS = np.concatenate([[1, 2, 4], np.arange(8, 1025, 8), np.arange(1040, 2049, 16), np.arange(2080, 4097, 32)])
OPERATORS = {  # milliseconds at 4,096 tokens on one GPU
    "emb": 0.2,
    "input_layernorm": 0.1,
    "attn_pre_proj": 3.2,
    "attn_rope": 0.08,
    "attn_kv_cache_save": 0.02,
    "attn_post_proj": 2.6,
    "post_attention_layernorm": 0.1,
    "mlp_up_proj": 15.0,
    "mlp_act": 0.5,
    "mlp_down_proj": 7.5,
    "add": 0.06,
}
SHAPE = {"n_head": 64, "n_kv_head": 8, "n_embd": 8192, "n_expanded_embd": 28672, "vocab_size": 32768}


def make(folder: Path, seed: int = 0) -> Path:
    """Write the folder and return it."""
    rng = np.random.default_rng(seed)
    place = folder / "compute/a100/meta-llama/Llama-2-70b-hf"
    network = folder / "network/a100_pairwise_nvlink"
    place.mkdir(parents=True)
    network.mkdir(parents=True)
    pl.concat([_operators(tp, rng) for tp in (1, 2, 4, 8)]).write_csv(place / "mlp.csv")
    pl.concat([_attention(tp, rng) for tp in (2, 4)]).write_csv(place / "attention.csv")
    pl.concat([_network("all_reduce", tp, rng) for tp in (2, 4)]).write_csv(network / "all_reduce.csv")
    _network("send_recv", 2, rng).write_csv(network / "send_recv.csv")
    return folder


def _noisy(milliseconds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.round(milliseconds * rng.lognormal(0, 0.03, milliseconds.shape), 3)


def _operators(tp: int, rng: np.random.Generator) -> pl.DataFrame:
    times = {
        f"time_stats.{name}.median": _noisy(0.01 + full / tp * np.maximum(TOKENS, 96) / 4096, rng)
        for name, full in OPERATORS.items()
    }
    shape = {name: pl.lit(value) for name, value in SHAPE.items()}
    frame = pl.DataFrame({**times, "num_tokens": TOKENS})
    return frame.with_columns(use_gated_mlp=True, num_tensor_parallel_workers=tp, **shape)


def _attention(tp: int, rng: np.random.Generator) -> pl.DataFrame:
    kv = np.concatenate([np.arange(32, 1025, 32), np.arange(1088, 4033, 64)])
    batch = np.concatenate([np.arange(1, 129), np.arange(136, 257, 8)])
    b, k = (a.ravel() for a in np.meshgrid(batch, kv))
    chunk, done = (a.ravel() for a in np.meshgrid(np.arange(64, 4097, 64), np.arange(0, 4096, 64)))
    fits = chunk + done <= 4096
    chunk, done = chunk[fits], done[fits]
    decode = _noisy(0.012 + 4e-6 / tp * b * k, rng)
    prefill = _noisy(0.015 + 2e-7 / tp * chunk * (done + chunk / 2), rng)
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


def _network(name: str, workers: int, rng: np.random.Generator) -> pl.DataFrame:
    size = np.unique(np.geomspace(2048, 2**29, 2248).astype(np.int64))
    frame = pl.DataFrame({f"time_stats.{name}.median": _noisy(0.02 + size / 2e8, rng), "size": size})
    return frame.with_columns(num_workers=workers, devices_per_node=workers, max_devices_per_node=4)
