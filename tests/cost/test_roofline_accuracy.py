"""How far the roofline is from measured kernels and engines; the bounds are what the docstrings state."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from lengthwise import catalog
from lengthwise.cost import operators
from lengthwise.cost.memory import shard_of
from lengthwise.cost.operator_work import Operators, kernels_of
from lengthwise.cost.roofline_tables import ENGINE_HOSTS
from lengthwise.engine import deploy, simulate
from lengthwise.engine.step_time import step_time
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.specs import GpuSpec
from lengthwise.schema.workload import Workload

AIC = "data/profiles/aiconfigurator"


def relative_errors(predicted, measured):
    return np.abs(predicted / measured - 1)


def check_errors(predicted, measured, median, p95):
    error = relative_errors(predicted, measured)
    assert np.median(error) <= median
    assert np.quantile(error, 0.95) <= p95


def columns(rows, *names):
    return [rows[name].to_numpy().astype(float) for name in names]


@pytest.mark.parametrize(
    ("gpu", "version", "dtype", "bounds"),
    [
        ("A100-80GB", "a100_sxm/gemm/vllm/0.14.0", "bfloat16", (0.11, 0.30)),
        ("H100", "h100_sxm/gemm/vllm/0.24.0", "bfloat16", (0.12, 0.30)),
        ("H200", "h200_sxm/gemm/vllm/0.24.0", "bfloat16", (0.11, 0.30)),
        ("B200", "b200_sxm/gemm/vllm/0.24.0", "bfloat16", (0.12, 0.45)),
        ("H100", "h100_sxm/gemm/vllm/0.24.0", "fp8", (0.12, 0.36)),
        ("H200", "h200_sxm/gemm/vllm/0.24.0", "fp8", (0.15, 0.40)),
        ("B200", "b200_sxm/gemm/vllm/0.24.0", "fp8", (0.13, 0.51)),
        ("B200", "b200_sxm/gemm/vllm/0.24.0", "nvfp4", (0.15, 0.40)),
    ],
)
def test_gemms_of_vllm(shared, gpu, version, dtype, bounds):
    rows = pl.read_parquet(shared(f"{AIC}/{version}/gemm_perf.parquet"))
    rows = rows.filter(pl.col("gemm_dtype") == dtype, pl.min_horizontal("n", "k") >= 512, pl.col("m") <= 8192)
    rows = rows.group_by("m", "n", "k").agg(pl.col("latency").median())
    m, n, k, ms = columns(rows, "m", "n", "k", "latency")
    kernels = kernels_of(catalog.gpu(gpu), {"nvfp4": "fp4"}.get(dtype, dtype))
    check_errors(kernels.gemm("", m, n, k).seconds * 1e3, ms, *bounds)


@pytest.mark.parametrize(
    ("device", "gpu", "bounds"),
    [("a100", "A100-80GB", (0.09, 0.22)), ("h100", "H100", (0.14, 0.35)), ("a40", "A40", (0.08, 0.25))],
)
@pytest.mark.parametrize("model", ["llama-2-7b", "llama-2-70b"])
def test_projections_of_vidur(shared, device, gpu, bounds, model):
    spec, kernels = catalog.model(model), kernels_of(catalog.gpu(gpu), "float16")
    name = {"llama-2-7b": "Llama-2-7b-hf", "llama-2-70b": "Llama-2-70b-hf"}[model]
    rows = pl.read_csv(shared(f"data/profiles/vidur/compute/{device}/meta-llama/{name}/mlp.csv.gz"))
    predicted, measured = [], []
    for tp in (1, 2, 4, 8):
        of_degree = rows.filter(pl.col("num_tensor_parallel_workers") == tp)
        ops = Operators(shard_of(spec, Parallelism(tp), EngineLimits()), kernels, catalog.node("dgx-a100"))
        works = {work.name: work for work in ops.layer(of_degree["num_tokens"].to_numpy().astype(float))}
        pairs = {"attn_pre_proj": "qkv projection", "attn_post_proj": "output projection"}
        pairs |= {"mlp_up_proj": "mlp up", "mlp_down_proj": "mlp down"}
        for other, own in pairs.items():
            predicted.append(works[own].seconds * 1e3)
            measured.append(of_degree[f"time_stats.{other}.median"].to_numpy())
    check_errors(np.concatenate(predicted), np.concatenate(measured), *bounds)


def attention_rows(path, kind):
    rows = pl.read_parquet(path)
    if "window_size" in rows.columns:
        rows = rows.filter(pl.col("window_size") == 0)
    return rows.filter(
        pl.col("kv_cache_dtype") == "bfloat16",
        pl.col("attn_dtype") == "bfloat16",
        pl.col("head_dim") == 128,
        pl.col("num_heads") >= 4,
        pl.col("op_name") == f"{kind}_attention",
    ).with_columns(kv=pl.when(pl.col("num_key_value_heads") == 0).then("num_heads").otherwise("num_key_value_heads"))


@pytest.mark.parametrize(
    ("gpu", "version", "median"),
    [
        ("A100-80GB", "a100_sxm/attention/vllm/0.14.0", 0.25),
        ("H100", "h100_sxm/attention/vllm/0.24.0", 0.10),
        ("H200", "h200_sxm/attention/vllm/0.24.0", 0.10),
        ("B200", "b200_sxm/attention/vllm/0.24.0", 0.25),
    ],
)
def test_decode_attention_of_vllm(shared, gpu, version, median):
    rows = attention_rows(shared(f"{AIC}/{version}/generation_attention_perf.parquet"), "generation")
    rows = rows.filter(pl.col("step") >= 16)
    seqs, isl, step, heads, kv, ms = columns(rows, "batch_size", "isl", "step", "num_heads", "kv", "latency")
    keys = seqs * (isl + step)
    work = kernels_of(catalog.gpu(gpu), "bfloat16").decode(
        "",
        seqs=seqs,
        keys=keys,
        head_flops=4 * heads * 128,
        moved_bytes=512 * kv * keys + 512 * heads * seqs,
        group=heads / kv,
    )
    assert np.median(relative_errors(work.seconds * 1e3, ms)) <= median


@pytest.mark.parametrize(
    ("gpu", "version", "median"),
    [
        ("A100-80GB", "a100_sxm/attention/vllm/0.14.0", 0.12),
        ("H100", "h100_sxm/attention/vllm/0.24.0", 0.10),
        ("H200", "h200_sxm/attention/vllm/0.24.0", 0.10),
        ("B200", "b200_sxm/attention/vllm/0.24.0", 0.15),
    ],
)
def test_prefill_attention_of_vllm(shared, gpu, version, median):
    rows = attention_rows(shared(f"{AIC}/{version}/context_attention_perf.parquet"), "context")
    rows = rows.filter(pl.col("isl") >= 16, pl.col("batch_size") == 1)
    chunk, heads, kv, ms = columns(rows, "isl", "num_heads", "kv", "latency")
    work = kernels_of(catalog.gpu(gpu), "bfloat16").prefill(
        "",
        pairs=chunk * (chunk + 1) / 2,
        mean_keys=(chunk + 1) / 2,
        keys=chunk,
        head_flops=4 * heads * 128,
        moved_bytes=512 * kv * chunk + 512 * heads * chunk,
    )
    assert np.median(relative_errors(work.seconds * 1e3, ms)) <= median


@pytest.mark.parametrize(
    ("gpu", "node", "version", "median"),
    [
        ("A100-80GB", "dgx-a100", "a100_sxm/comm/vllm/0.14.0", 0.20),
        ("H100", "dgx-h100", "h100_sxm/comm/vllm/0.24.0", 0.22),
    ],
)
def test_all_reduce_of_vllm(shared, gpu, node, version, median):
    rows = pl.read_parquet(shared(f"{AIC}/{version}/custom_allreduce_perf.parquet"))
    rows = rows.filter(pl.col("backend") == "vllm_graph")
    model = catalog.model("llama-2-70b")
    errors = []
    for tp in (2, 4, 8):
        of_degree = rows.filter(pl.col("num_gpus") == tp)
        shard = shard_of(model, Parallelism(tp), EngineLimits())
        ops = Operators(shard, kernels_of(catalog.gpu(gpu), "bfloat16"), catalog.node(node))
        elements, ms = columns(of_degree, "message_size", "latency")
        (two,) = ops.all_reduces(elements / model.hidden)
        errors.append(relative_errors(two.seconds / 2 * 1e3, ms))
    assert np.median(np.concatenate(errors)) <= median


@pytest.mark.parametrize(
    ("gpu", "version", "balance"),
    [("A100-80GB", "a100_sxm/moe/vllm/0.14.0", "power_law_1.01"), ("H100", "h100_sxm/moe/vllm/0.24.0", "balanced")],
)
def test_fused_experts_of_vllm(shared, gpu, version, balance):
    rows = pl.read_parquet(shared(f"{AIC}/{version}/moe_perf.parquet")).filter(
        pl.col("moe_dtype") == "bfloat16",
        pl.col("moe_ep_size") == 1,
        pl.col("num_tokens") <= 8192,
        pl.col("distribution") == balance,
    )
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "latency")
    tokens, hidden, width, top, experts, tp, ms = columns(rows, *names)
    kernels, hit = kernels_of(catalog.gpu(gpu), "bfloat16"), experts * (1 - (1 - top / experts) ** tokens)
    up = kernels.grouped_gemm("", tokens * top, hit, 2 * width / tp, hidden)
    down = kernels.grouped_gemm("", tokens * top, hit, hidden, width / tp)
    check_errors((up.seconds + down.seconds) * 1e3, ms, 0.25, 0.70)


SERVED = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "moonshotai/Kimi-K2.5": "kimi-k2",
}
DTYPES = {"fp8": "fp8", "nvfp4": "fp4", "int4_wo": "int4"}


@pytest.mark.parametrize(
    ("model", "backend", "system", "points", "bounds"),
    [
        ("meta-llama/Llama-3.1-70B", "vllm", "h100_sxm", 45, (0.05, 0.18)),
        ("meta-llama/Llama-3.1-70B", "vllm", "h200_sxm", 60, (0.07, 0.16)),
        ("meta-llama/Llama-3.1-70B", "vllm", "b200_sxm", 120, (0.07, 0.16)),
        ("meta-llama/Llama-3.1-70B", "trtllm", "h200_sxm", 72, (0.28, 0.44)),
        ("meta-llama/Llama-3.1-70B", "trtllm", "b200_sxm", 144, (0.11, 0.27)),
        ("deepseek-ai/DeepSeek-V3", "sglang", "h200_sxm", 15, (0.10, 0.18)),
        ("moonshotai/Kimi-K2.5", "vllm", "h200_sxm", 45, (0.17, 0.23)),
    ],
)
def test_time_per_token_of_engines(shared, model, backend, system, points, bounds):
    """Per output token a decode step of the batch and, spread over the output, its share of prefills.

    The host of an engine is one fit to the deployments of all models, so that a better fit of all can raise the errors
    of one model by 0.01 or 0.02.
    """
    rows = pl.read_csv(shared(f"{AIC}/silicon_sample.csv.gz"), infer_schema_length=None)
    rows = rows.filter(
        pl.col("mode") == "agg",
        pl.col("backend") == backend,
        pl.col("model_path") == model,
        pl.col("system") == system,
        pl.col("moe_ep_size").fill_null(1) == 1,
    )
    assert len(rows) == points
    rows = rows.to_dicts()
    predicted = np.array([time_per_token_ms(row) for row in rows])
    check_errors(predicted, np.array([row["silicon_tpot_ms"] for row in rows]), *bounds)


def time_per_token_ms(row):
    gpu, host = catalog.gpu(row["system"].split("_")[0].upper()), ENGINE_HOSTS[row["backend"]]
    limits = EngineLimits(weight_dtype=DTYPES[row["gemm_quant_mode"]], kv_dtype="fp8")
    model = catalog.model(SERVED[row["model_path"]])
    clients, tp = (int(row["silicon_data_source"].split("silicon_concurrency=")[1].split(";")[0]), row["tp_size"])
    isl, osl = round(0.9 * row["isl"]), round(0.9 * row["osl"])  # drawn from 0.8 to 1 of the nominal lengths
    node = catalog.default_node(gpu, tp)

    def step_s(**what):
        return sum(row.seconds for row in operators(model, gpu, node, Parallelism(tp), limits, host=host, **what))

    decode_s = step_s(decode_seqs=clients, kv_tokens=int(clients * (isl + osl / 2)))
    prompts = min(clients, max(1, 8192 // isl))  # of one step, which launches its kernels once
    prefill_s = step_s(prefill=[(isl, 0)] * prompts) / prompts
    return 1e3 * (decode_s + (clients - 1) * prefill_s / osl)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "bounds"), [("H100", (0.08, 0.23)), ("H200", (0.065, 0.14)), ("B200", (0.09, 0.23))])
def test_the_roofline_predicts_the_time_per_token_of_vllm(shared, gpu, bounds):
    """``deploy`` with the engine's host by name and the engine in a closed loop, nothing else."""
    rows = pl.read_csv(shared(f"{AIC}/silicon_sample.csv.gz"), infer_schema_length=None).filter(
        pl.col("mode") == "agg",
        pl.col("backend") == "vllm",
        pl.col("model_path") == "meta-llama/Llama-3.1-70B",
        pl.col("system") == f"{gpu.lower()}_sxm",
        pl.col("tp_size").is_in([2, 8]),
    )
    rows = rows.to_dicts()
    assert len(rows) >= 30
    message = np.array([simulated_ms(row, gpu) for row in rows])
    check_errors(message, np.array([row["silicon_tpot_ms"] for row in rows]), *bounds)


def simulated_ms(row, gpu):
    clients = int(row["silicon_data_source"].split("silicon_concurrency=")[1].split(";")[0])
    longest = row["isl"] + row["osl"] + 1
    dtype = DTYPES[row["gemm_quant_mode"]]
    limits = EngineLimits(
        max_num_seqs=clients, max_num_batched_tokens=8192, max_model_len=longest, weight_dtype=dtype, kv_dtype="fp8"
    )
    deployment = deploy("llama-3.1-70b", gpu, tp=row["tp_size"], limits=limits, host="vllm")
    rng, n = np.random.default_rng(0), 4 * clients
    isl, osl = (rng.integers(int(0.8 * row[side]), row[side], n, endpoint=True) for side in ("isl", "osl"))
    requests = simulate(Workload(np.zeros(n), isl, osl, concurrency=clients), deployment, max_log_steps=0).requests
    return 1e3 * np.mean((requests.finished_s - requests.first_token_s) / (requests.output_tokens - 1))


CPU_STEPS_MS = {  # cached tokens: milliseconds of a step by the tokens of its one prompt's chunk
    0: {8: 13.9, 32: 24.6, 64: 39.9, 128: 71.1, 240: 147.3},
    64: {8: 14.3, 32: 24.8, 64: 40.9, 128: 72.7, 240: 131.0},
    128: {8: 14.2, 32: 25.0, 64: 39.8, 128: 71.8, 240: 142.2},
    256: {8: 14.4, 32: 26.2, 64: 45.0, 128: 78.9, 240: 145.6},
    512: {8: 14.8, 32: 27.4, 64: 48.4, 128: 83.2, 240: 147.8},
    768: {8: 15.2, 32: 29.1, 64: 49.1, 128: 92.1, 240: 189.6},
}
"""vLLM 0.32 with prefix caching on one core of an AMD EPYC, by its log: the fastest of 9 steps each."""


def test_steps_of_a_real_vllm_on_a_cpu_with_cached_prefixes():
    peaks = {"peak_flops": {"float32": 101.1e9}, "bandwidth_bytes_per_s": 26.9e9, "memory_bytes": 16 * 2**30}
    cpu = GpuSpec("one core", tdp_w=1, idle_w=1, price_per_hour_usd=1, price_source="", source="", is_cpu=True, **peaks)
    limits = EngineLimits(max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=1024, weight_dtype="float32")
    config = Path(__file__).parents[1] / "measure" / "data" / "slow_cpu" / "vllm" / "small.json"
    steps = [(chunk, context) for context, of in CPU_STEPS_MS.items() for chunk in of]
    measured = np.array([CPU_STEPS_MS[context][chunk] for chunk, context in steps])

    def ms(gpu):
        seconds = step_time(deploy(str(config), gpu, limits=limits).cost)
        return np.array([1e3 * seconds(0, 0, [step]) for step in steps])

    check_errors(ms(cpu), measured, 0.16, 0.52)
    assert np.median(ms(replace(cpu, is_cpu=False)) / measured) > 3
