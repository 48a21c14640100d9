"""Experts divided over GPUs and data-parallel ranks: memory by hand, loads against drawn routes, published times."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise import catalog
from lengthwise.cost import MadeFor, operators, plan_memory, prompt_seconds, roofline
from lengthwise.cost.experts import CONCENTRATION, busiest_gpu, rebalance_experts
from lengthwise.cost.memory import shard_of
from lengthwise.cost.model_error import comparable_deployments, deployment_notes, perturbed
from lengthwise.cost.operator_work import CURVES, DEEPEP_LATENCY_S, Operators, kernels_of
from lengthwise.cost.roofline_tables import operators_of
from lengthwise.cost.tables import load, save
from lengthwise.engine import deploy, disaggregate
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import DoesNotFitError, InputError, UnknownNameError
from lengthwise.schema.specs import GIB, LinkSpec, NodeSpec

DEEPSEEK, QWEN, LLAMA = (catalog.model(name) for name in ("deepseek-v3", "qwen3-235b-a22b", "llama-3.1-8b"))
H200 = catalog.gpu("H200")
LIMITS = EngineLimits(max_num_batched_tokens=512, max_num_seqs=64, weight_dtype="fp8")
MOE = [name for name, model in sorted(catalog.models().items()) if model.ffn.experts]
NARROW = {"dp": 8, "ep": 8}


def tables_of(model, parallel, limits=LIMITS):
    return roofline(model, H200, catalog.default_node(H200, parallel.gpus_per_replica), parallel, limits, 2048)


def ops_of(model, parallel, node=None, limits=LIMITS):
    shard = shard_of(model, parallel, limits)
    node = node or catalog.default_node(H200, parallel.gpus_per_replica)
    return Operators(shard, kernels_of(H200, shard.weight_dtype), node)


# Memory


def test_deepseek_v3_on_8_gpus_by_hand():
    """FP8 weights have 1 byte; embedding and head have 2. The latents of a token, 512 + 64 in 61 layers, have 2."""
    q_down, kv_down = 7168 * 1536, 7168 * 576  # on every GPU of a tensor-parallel group
    q_up, kv_up, out = 1536 * 128 * 192, 512 * 128 * 256, 128 * 128 * 7168
    norms = 1536 + 512 + 2 * 7168
    expert = 3 * 7168 * 2048  # the shared expert has the size of a routed one
    router, dense, table = 7168 * 256, 3 * 7168 * 18432, 129280 * 7168 * 2
    by_tp = {
        parallel: shard_of(DEEPSEEK, parallel, LIMITS).stage_weight_bytes()[0]
        for parallel in (Parallelism(8), Parallelism(1, **NARROW))
    }
    routed = 58 * 256 * expert / 8  # an eighth of all experts either way
    attention = 61 * (q_up + kv_up + out + norms)
    rest = attention + 58 * expert + 3 * dense + 2 * table
    each = routed + 61 * (q_down + kv_down) + 58 * router
    # The count of a layer's weights has a router in each layer whose weights are replicated: 3 more, 0.007 GB.
    assert by_tp[Parallelism(8)] == pytest.approx(each + rest / 8, rel=3e-4)
    assert by_tp[Parallelism(1, **NARROW)] == pytest.approx(each + rest, rel=3e-4)


def test_data_parallel_attention_holds_several_times_the_tokens():
    limits = replace(LIMITS, max_num_batched_tokens=8192)
    one, many = (plan_memory(DEEPSEEK, H200, of, limits, 8192) for of in (Parallelism(8), Parallelism(1, **NARROW)))
    # Every GPU has a token's complete latents, but each of the 8 ranks has tokens of its own.
    assert one.kv_bytes_per_block == many.kv_bytes_per_block == 16 * 61 * 576 * 2
    assert 3 * one.num_blocks < 8 * many.num_blocks < 8 * one.num_blocks
    # The tokens of the 7 other ranks come before the experts, and their results go back.
    assert many.activation_bytes - one.activation_bytes > 2 * 7 * 8192 * 7168 * 2


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(MOE), tp=st.sampled_from([1, 2, 4]), dp=st.sampled_from([1, 2, 8]), data=st.data())
def test_gpus_hold_every_expert_once_and_redundant_ones_again(name, tp, dp, data):
    """Law 78."""
    model = catalog.model(name)
    experts, gpus = model.ffn.experts, tp * dp
    ep = data.draw(st.sampled_from([ep for ep in (1, 2, 4, 8, 16) if gpus % ep == 0 and experts % ep == 0]))
    more = data.draw(st.sampled_from([None, 0, ep, 4 * ep])) if ep > 1 else None
    if model.attention.heads % tp:
        return
    parallel = Parallelism(tp, dp=dp, ep=ep, redundant_experts=more)
    own, alone = (shard_of(model, of, LIMITS).stage_weight_bytes()[0] for of in (parallel, Parallelism(tp)))
    routed = sum(catalog.routed_weight_bytes(model, i, "fp8") for i in range(model.layers))
    assert gpus * (own - alone + routed / tp) == pytest.approx(routed * (1 + (more or 0) / experts), rel=1e-9)


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        (LLAMA, {"dp": 2}, "llama-3.1-8b has none.*set replicas = 6"),
        (LLAMA, {"tp": 2, "ep": 2}, "ep is for models with experts, and.*Leave ep out"),
        (LLAMA, {"all2all_backend": "deepep_low_latency"}, "has none. Leave all2all_backend out"),
        (DEEPSEEK, {"all2all_backend": "deepep_low_latency"}, "needs dp above 1 and.*dp is 1 and ep is 1. Change"),
        (DEEPSEEK, {"tp": 8, "all2all_backend": "deepep_high_throughput"}, "needs dp above 1 and ep = tp x dp"),
        (DEEPSEEK, {"dp": 3, "ep": 3}, r"ep must divide tp x dp, 3 GPUs, and the 256 experts.*one of 1$"),
        (DEEPSEEK, {"tp": 4, "dp": 2, "ep": 16}, "it is 16. Use one of 1, 2, 4, 8"),
        (DEEPSEEK, {"dp": 8, "redundant_experts": 8}, "redundant_experts needs expert parallelism"),
        (DEEPSEEK, {**NARROW, "redundant_experts": 12}, "multiple of ep, 8; redundant_experts is 12. Use 0, 8, ..."),
        (DEEPSEEK, {"tp": 8, "ep": 8, "all2all_backend": "deepep_low_latency"}, "needs dp above 1 and ep = tp x dp"),
    ],
)
def test_errors_say_what_fits(model, parallel, message):
    with pytest.raises(InputError, match=message):
        shard_of(model, Parallelism(**parallel, replicas=3), LIMITS)


def test_wrong_keys_and_what_does_not_fit_are_refused():
    with pytest.raises(UnknownNameError, match="all2all_backend"):
        Parallelism(all2all_backend="pplx")
    with pytest.raises(InputError, match="redundant_experts must be a whole number"):
        Parallelism(redundant_experts=-1)
    with pytest.raises(DoesNotFitError, match=r"not fit H200 with .*dp=2, ep=2.*buffers.*over more GPUs \(tp x dp\)"):
        plan_memory(DEEPSEEK, H200, Parallelism(1, dp=2, ep=2), LIMITS, 2048)
    with pytest.raises(InputError, match=r'ep is 2. Take cost "roofline"'):
        deploy(QWEN, H200, tp=4, ep=2, limits=LIMITS, cost="profile:missing.parquet")


# Loads


def drawn_loads(tokens, experts, k, ep, layers, seed):
    """Return (rows of the busiest GPU, most experts hit on a GPU), means over layers whose tokens draw k experts."""
    rng = np.random.default_rng(seed)
    rows, hit = [], []
    for _ in range(layers):
        popularity = np.log(rng.gamma(CONCENTRATION, size=experts))
        draws = popularity + rng.gumbel(size=(tokens, experts))  # the k largest: k draws without replacement
        chosen = np.argpartition(-draws, k - 1, axis=1)[:, :k]
        count = np.bincount(chosen.ravel(), minlength=experts).reshape(ep, -1)
        rows.append(count.sum(axis=1).max())
        hit.append((count > 0).sum(axis=1).max())
    return np.mean(rows), np.mean(hit)


@pytest.mark.parametrize(("experts", "k", "ep"), [(256, 8, 8), (256, 8, 64), (128, 8, 16), (8, 2, 4), (512, 10, 8)])
@pytest.mark.parametrize("tokens", [4, 64, 1024])
def test_the_busiest_gpu_is_that_of_drawn_routes(experts, k, ep, tokens):
    drawn = drawn_loads(tokens, experts, k, ep, 60, seed=experts + tokens)
    found = busiest_gpu(tokens, experts=experts, experts_per_token=k, ep=ep)
    assert found == pytest.approx(drawn, rel=0.2 if tokens < 64 else 0.1)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.sampled_from([(256, 8), (128, 8), (64, 6), (8, 2), (16, 1)]),
    ep=st.sampled_from([2, 4, 8]),
    copies=st.sampled_from([None, 0, 1, 4]),
)
def test_the_busiest_gpu_has_at_least_the_mean_and_more_tokens_never_fewer_rows(sizes, ep, copies):
    """Law 79."""
    experts, k = sizes
    of, redundant = {"experts": experts, "experts_per_token": k, "ep": ep}, None if copies is None else copies * ep
    tokens = np.arange(4097)
    rows, hit = busiest_gpu(tokens, **of, redundant=redundant)
    slots = (experts + (redundant or 0)) // ep
    assert (rows >= tokens * k / ep * (1 - 1e-9)).all()
    assert (rows <= tokens * min(k, slots) * (1 + 1e-9)).all()
    assert (np.diff(rows) >= -1e-9 * rows.max()).all()
    assert (np.diff(hit) >= -1e-12).all()
    assert (hit <= np.minimum(rows, slots) * (1 + 1e-9)).all()
    if copies is not None:  # EPLB balances what the tokens choose on average.
        assert rows[-1] <= busiest_gpu(4096, **of)[0] * (1 + 1e-9)


def test_the_popularity_agrees_with_the_fitted_share_of_hit_experts():
    tokens = np.geomspace(1, 4096, 40)
    fitted = 1 - (1 - 8 / 256) ** (tokens**CURVES.routing_power)
    ops = ops_of(DEEPSEEK, Parallelism(8))
    assert ops.experts_hit(tokens) / 256 == pytest.approx(fitted)
    rng, drawn = np.random.default_rng(0), np.zeros(len(tokens))
    for _ in range(200):  # of each popularity, as many clocks that ring before the eighth as there are experts
        share = rng.gamma(CONCENTRATION, size=256)
        eighth = np.sort(rng.exponential(size=(64, 256)) / share, axis=1)[:, 7].mean()
        drawn += [(1 - np.exp(-eighth * share * t)).mean() for t in tokens]
    assert drawn / 200 == pytest.approx(fitted, abs=0.03)


def test_eplb_places_every_expert_and_the_redundant_ones_where_load_is():
    load = np.random.default_rng(1).gamma(1.0, size=(3, 64))
    placed = rebalance_experts(load, 80, 1, 1, 8)
    for row, of in zip(placed, load, strict=True):
        copies = np.bincount(row, minlength=64)
        assert copies.min() == 1
        assert copies.sum() == 80
        # No expert with several copies has a smaller load for each than one that could have had the copy.
        assert (of / copies).max() <= (of[copies > 1] / (copies[copies > 1] - 1)).min()
        gpus = (of / copies)[row].reshape(8, 10).sum(axis=1)
        before = of.reshape(8, 8).sum(axis=1)
        assert gpus.max() < before.max()


# Costs


@pytest.mark.parametrize("name", MOE)
def test_without_data_and_expert_parallelism_every_gpu_has_a_part_of_each_expert(name):
    model, tokens = catalog.model(name), np.arange(1.0, 513.0)
    ops = ops_of(model, Parallelism(2))
    ffn, works = model.ffn, {work.name: work for work in ops.layer(tokens)}
    width, rows = ffn.expert_intermediate / 2, tokens * ffn.experts_per_token
    up = ops.kernels.grouped_gemm("", rows, ops.experts_hit(tokens), (2 if ffn.gated else 1) * width, model.hidden)
    share = 1 - ffn.dense_layers / model.layers
    assert works["experts up"].seconds == pytest.approx(up.times(share).seconds, rel=1e-12)
    assert ops.shared(tokens) == []
    assert tables_of(model, Parallelism(2)).shared_s is None


def test_data_parallel_ranks_share_the_experts_and_nothing_else():
    alone, ranks = tables_of(QWEN, Parallelism(1)), tables_of(QWEN, Parallelism(1, **NARROW))
    assert len(ranks.shared_s) == 8 * 512 + 1
    assert ranks.shared_s[0] == 0
    assert (np.diff(ranks.shared_s) >= -1e-12 * ranks.shared_s.max()).all()
    for name in ("head_s", "embedding_s", "prefill_s", "decode_s", "host_s"):
        assert getattr(ranks, name) == pytest.approx(getattr(alone, name)), name
    # What a rank computes alone is its layer without routed experts.
    ops = ops_of(QWEN, Parallelism(1))
    routed = sum(work.seconds for work in ops.layer(512.0) if work.name.startswith("expert"))
    assert alone.layer_s[512] - ranks.layer_s[512] == pytest.approx(routed)
    # 8 ranks of 64 tokens read the experts of 512 tokens once, an eighth on each GPU.
    assert ranks.shared_s[512] < alone.layer_s[512]


def test_operators_add_up_to_the_tables():
    parallel = Parallelism(2, dp=4, ep=8, redundant_experts=8)
    tables = tables_of(QWEN, parallel)
    rows = operators(QWEN, H200, catalog.node("hgx-h200"), parallel, LIMITS, decode_seqs=48, kv_tokens=4800)
    assert {row.name for row in rows} >= {"all-gather", "reduce-scatter", "experts up", "router"}
    shared = sum(row.seconds for row in rows if row.part == "shared")
    assert shared == pytest.approx(QWEN.layers * tables.shared_s[4 * 48])
    own = sum(row.seconds for row in rows if row.part == "layer")
    assert own == pytest.approx(QWEN.layers * tables.layer_s[48])


def test_expert_parallelism_inside_a_tensor_parallel_group_trades_width_for_balance():
    split, divided = (ops_of(QWEN, of) for of in (Parallelism(8), Parallelism(8, ep=8)))
    (_, up, *_), (_, divided_up, *_) = (ops.experts(4096.0, *reversed(ops.busiest(4096.0))) for ops in (split, divided))
    # An eighth of the rows and more for the imbalance, eight times as wide.
    assert 1.02 < float(divided_up.flops / up.flops) < 1.3
    assert divided.all_reduces(64.0) == split.all_reduces(64.0)
    assert tables_of(QWEN, Parallelism(8, ep=8)).shared_s is None


def test_redundant_experts_shorten_the_steps_of_an_uneven_layer():
    times = [
        tables_of(DEEPSEEK, Parallelism(1, dp=32, ep=32, redundant_experts=more)).shared_s[-1] for more in (None, 0, 32)
    ]
    assert times[0] > max(times[1:])


def test_tables_are_saved_with_their_shared_part_and_for_their_split(tmp_path):
    parallel = Parallelism(1, **NARROW)
    node, tables = catalog.node("hgx-h200"), tables_of(QWEN, parallel)
    made_for = MadeFor.of(QWEN, H200, node, parallel, LIMITS)
    save(tables, tmp_path / "dp.npz", made_for)
    assert load(tmp_path / "dp.npz").shared_s.tolist() == tables.shared_s.tolist()
    other = MadeFor.of(QWEN, H200, node, replace(parallel, dp=4, ep=4, redundant_experts=8), LIMITS)
    assert made_for.differences(other) == ["dp 8, not 4", "ep 8, not 4", "redundant_experts None, not 8"]
    with pytest.raises(InputError, match=r"data-parallel ranks, dp 1: theirs have a part"):
        deploy(QWEN, H200, tp=8, limits=LIMITS, cost=tables)
    deployed = deploy(QWEN, H200, **NARROW, limits=LIMITS)
    assert deployed.cost.shared_s.tolist() == tables.shared_s.tolist()
    assert deployed.gpus == 8


def test_an_error_of_the_shared_part_leaves_the_draws_of_the_others():
    one, ranks = (deploy(QWEN, H200, limits=LIMITS, **of) for of in ({"tp": 4}, {"dp": 8, "ep": 8}))
    pairs = list(zip(comparable_deployments(one, 8), comparable_deployments(ranks, 8), strict=True))
    for a, b in pairs[1:]:
        ratio = [of.cost.decode_s[-1, -1] / own.cost.decode_s[-1, -1] for of, own in ((a, one), (b, ranks))]
        assert ratio[0] == pytest.approx(ratio[1])
    factors = [of.shared_s[-1] / ranks.cost.shared_s[-1] for of in perturbed(ranks.cost, 8)]
    assert min(factors) < 0.8
    assert max(factors) > 1.25


def test_a_prompt_alone_also_takes_its_part_of_the_shared_work():
    tables = tables_of(QWEN, Parallelism(1, **NARROW))
    without = replace(tables, shared_s=None)
    more = prompt_seconds(tables, np.array([300]), np.array([0]), 512) - prompt_seconds(
        without, np.array([300]), np.array([0]), 512
    )
    assert more == pytest.approx(QWEN.layers * tables.shared_s[300])


# The exchange against measurements

LOW_LATENCY_US = {
    8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360),
}  # fmt: skip
"""Dispatch and combine of DeepEP's low-latency kernels by GPUs (github.com/deepseek-ai/DeepEP, docs/legacy.md): H800
(160 GB/s NVLink, 400 Gb/s InfiniBand), 128 tokens of each GPU, 7,168 wide, 8 experts a token, FP8 and BF16."""
LOGICAL_GB_PER_S = {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}
"""Bytes per second of its other kernels, with tokens for the own GPU or node: NVLink for 8 GPUs, else InfiniBand; 4,096
tokens of each GPU, whose experts are on 4 nodes at most."""
H800 = NodeSpec(
    "hgx-h800", 8, LinkSpec("nvlink4-h800", 160e9, 3.1e-6, ""), 8, catalog.node("dgx-h100").fallback_link,
    catalog.node("dgx-h100").network, "",
)  # fmt: skip


def deepep(kind, gpus, tokens, monkeypatch):
    """Return the seconds of dispatch and combine of evenly routed tokens."""
    monkeypatch.setattr("lengthwise.cost.operator_work.busiest_gpu", lambda t, **of: (t * 8 / of["ep"], 1))
    ops = ops_of(DEEPSEEK, Parallelism(1, dp=gpus, ep=gpus, all2all_backend=kind), H800)
    return [float(work.seconds) for work in ops.exchange(float(tokens * gpus))]


def test_low_latency_kernels_of_deepep(monkeypatch):
    found = [deepep("deepep_low_latency", gpus, 128, monkeypatch) for gpus in LOW_LATENCY_US]
    error = np.abs(np.array(found) * 1e6 / np.array(list(LOW_LATENCY_US.values())) - 1)
    assert np.median(error) <= 0.03
    assert error.max() <= 0.12
    assert all(min(pair) > DEEPEP_LATENCY_S for pair in found)


def test_high_throughput_kernels_of_deepep(monkeypatch):
    errors = []
    for gpus, measured in LOGICAL_GB_PER_S.items():
        nodes = gpus // 8
        reached = min(nodes, 4) if nodes > 1 else 8 * (1 - (7 / 8) ** 8)  # nodes of a token, or GPUs
        for seconds, rate, width in zip(
            deepep("deepep_high_throughput", gpus, 4096, monkeypatch), measured, (1 + 4 / 128, 2), strict=True
        ):
            errors.append(seconds / (4096 * reached * 7168 * width / (rate * 1e9)) - 1)
    assert np.median(np.abs(errors)) <= 0.17
    assert np.max(np.abs(errors)) <= 0.25


AIC = "data/profiles/aiconfigurator"


@pytest.mark.parametrize(
    ("gpu", "version", "bounds"),
    [
        ("A100-80GB", "a100_sxm/comm/nccl/2.27.3", (0.15, 0.43)),
        ("H100", "h100_sxm/comm/nccl/2.29.2", (0.12, 0.41)),
        ("H200", "h200_sxm/comm/nccl/2.29.2", (0.13, 0.41)),
        ("B200", "b200_sxm/comm/nccl/2.29.2", (0.11, 0.35)),
    ],
)
def test_all_gather_and_reduce_scatter_of_nccl(shared, gpu, version, bounds):
    rows = pl.read_parquet(shared(f"{AIC}/{version}/nccl_perf.parquet")).filter(pl.col("nccl_dtype") == "half")
    errors = []
    for gpus in (2, 4, 8):
        ops = ops_of(
            QWEN,
            Parallelism(1, dp=gpus),
            catalog.default_node(catalog.gpu(gpu), 8),
            replace(LIMITS, weight_dtype="bfloat16"),
        )
        for at, name in enumerate(("all_gather", "reduce_scatter")):
            own = rows.filter(pl.col("op_name") == name, pl.col("num_gpus") == gpus)
            elements, ms = (own[column].to_numpy().astype(float) for column in ("message_size", "latency"))
            work = ops.exchange(elements / QWEN.hidden)[at]
            errors.append(np.abs(work.seconds * 1e3 / ms - 1))
    errors = np.concatenate(errors)
    assert np.median(errors) <= bounds[0]
    assert np.quantile(errors, 0.95) <= bounds[1]


@pytest.mark.parametrize(
    ("gpu", "dtype", "balance", "bounds"),
    [
        ("H100", "bfloat16", "balanced", (0.19, 0.50)),
        ("H100", "bfloat16", "power_law_1.01", (0.26, 0.55)),
        ("H200", "bfloat16", "power_law_1.01", (0.30, 0.56)),
        ("H100", "fp8_block", "power_law_1.01", (0.28, 0.65)),
        ("H200", "fp8_block", "power_law_1.01", (0.19, 0.50)),
    ],
)
def test_experts_on_different_gpus_of_vllm(shared, gpu, dtype, balance, bounds):
    """The fused experts of the busiest of 2 to 256 GPUs, which has all tokens; ``balance`` is how they are routed.

    FP8 with scales by block has bounds 0.03 to 0.04 above those of a roofline without the kernels that quantize the
    inputs: complete deployments, to which the hosts are fitted, need these kernels.
    """
    rows = pl.read_parquet(shared(f"{AIC}/{gpu.lower()}_sxm/moe/vllm/0.24.0/moe_perf.parquet")).filter(
        pl.col("moe_dtype") == dtype,
        pl.col("moe_ep_size") > 1,
        pl.col("moe_tp_size") == 1,
        pl.col("num_tokens").is_between(16, 8192),
        pl.col("distribution") == balance,
    )
    kernels, errors = kernels_of(catalog.gpu(gpu), dtype.partition("_")[0]), []
    names = ("num_experts", "topk", "moe_ep_size", "hidden_size", "inter_size")
    for (experts, k, ep, hidden, width), own in rows.group_by(*names):
        ffn = replace(QWEN.ffn, experts=experts, experts_per_token=k, expert_intermediate=width)
        shard = shard_of(replace(QWEN, hidden=hidden, ffn=ffn), Parallelism(1, dp=ep, ep=ep), LIMITS)
        tokens, ms = (own[name].to_numpy().astype(float) for name in ("num_tokens", "latency"))
        ops = Operators(shard, kernels, catalog.node("hgx-h200"))
        seconds = sum(work.seconds for work in ops.shared(tokens) if work.name.startswith("expert"))
        errors.append(np.abs(seconds * 1e3 / ms - 1))
    assert len(rows) > 2000
    assert np.median(np.concatenate(errors)) <= bounds[0]
    assert np.quantile(np.concatenate(errors), 0.95) <= bounds[1]


def test_memory_of_deepeps_buffers():
    limits = replace(LIMITS, max_num_batched_tokens=128)
    plans = {
        kind: plan_memory(
            DEEPSEEK, H200, Parallelism(1, **NARROW, redundant_experts=32, all2all_backend=kind), limits, 2048
        )
        for kind in ("deepep_high_throughput", "deepep_low_latency")
    }
    more = plans["deepep_low_latency"].activation_bytes - plans["deepep_high_throughput"].activation_bytes
    assert more == pytest.approx(2116e6, rel=0.01)  # "Allocating buffer size: 2116 MB" for 288 experts
    assert plans["deepep_high_throughput"].activation_bytes > GIB


def test_a_note_says_which_fp8_blocks_an_engine_refuses():
    """vLLM 0.32 refuses an MLP whose columns on a GPU are no multiple of the block (validate_fp8_block_shape_moe)."""

    def notes(**degrees):
        return " ".join(deployment_notes(deploy(QWEN, H200, limits=LIMITS, **degrees)))

    assert "an expert of qwen3-235b-a22b has 192 columns on each of 8 GPUs" in notes(tp=8)
    assert "FP8 weights" not in notes(tp=8, ep=8) + notes(tp=4)
    split = disaggregate(deploy(QWEN, H200, tp=4, limits=LIMITS), deploy(QWEN, H200, tp=8, limits=LIMITS))
    assert "192 columns on each of 8 GPUs" in " ".join(deployment_notes(split)), "of the decode side"
    assert "FP8 weights" not in " ".join(deployment_notes(deploy(DEEPSEEK, H200, tp=8, limits=LIMITS)))


def test_attention_of_a_model_with_experts_in_fp4_costs_as_much_as_in_16_bits():
    gpu, limits = catalog.gpu("B200"), EngineLimits(weight_dtype="fp4")
    node = catalog.default_node(gpu, 8)
    seconds = {}
    for dtype in ("fp4", "bfloat16"):
        ops = operators_of(catalog.model("kimi-k2"), gpu, node, Parallelism(8), replace(limits, weight_dtype=dtype))
        seconds[dtype] = {work.name: float(work.seconds) for work in ops.layer(64.0)}
    for name, one in seconds["fp4"].items():
        if name.startswith("experts"):
            assert one < 0.6 * seconds["bfloat16"][name]
        else:
            assert one == pytest.approx(seconds["bfloat16"][name]), name


def test_another_routing_power_hits_other_numbers_of_experts_on_the_busiest_gpu():
    model, gpu, parallel = catalog.model("deepseek-v3"), catalog.gpu("H200"), Parallelism(8, ep=8)
    node = catalog.default_node(gpu, 8)
    hit = {
        power: operators_of(model, gpu, node, parallel, EngineLimits(), replace(CURVES, routing_power=power)).busiest(
            64.0
        )
        for power in (0.9, 0.96, 1.0)
    }
    assert hit[0.9][1] < hit[0.96][1] < hit[1.0][1]
    assert hit[0.9][0] == pytest.approx(hit[1.0][0])
    assert hit[0.96] == pytest.approx(operators_of(model, gpu, node, parallel, EngineLimits()).busiest(64.0))
