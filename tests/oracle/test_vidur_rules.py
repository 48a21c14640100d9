"""The engine's Vidur schedulers against Vidur's rules, reimplemented (vidur_rules.py).

First the oracle must reproduce recorded runs of Vidur, then the engine must do what the oracle
does on seeded random clusters, iteration by iteration.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from lengthwise import catalog, cost, policy
from lengthwise.engine import simulate
from lengthwise.schema.cost_tables import MERGED, AttentionRule, CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))
from vidur_rules import Rules, features, play, recorded_stage_times

ROUTERS = {"round_robin": "round_robin", "lor": "least_waiting"}
REQUEST_LEVEL = ("orca", "faster_transformer")
MODEL = catalog.model("meta-llama/Llama-2-7b-hf")
TICK_S = 2.0**-20


@dataclass(frozen=True)
class Kind:
    """A family of random clusters. ``tight`` KV memory throws requests back, a ``burst`` arrives
    in one to three instants, ``equal`` requests have one length."""

    scheduler: str
    stages: tuple[int, ...] = (1,)
    replicas: tuple[int, ...] = (1,)
    tight: bool = False
    burst: bool = False
    equal: bool = False


KINDS = {
    "vllm": Kind("vllm", replicas=(1, 2)),
    "vllm tight": Kind("vllm", tight=True),
    "vllm tight burst": Kind("vllm", tight=True, burst=True),
    "vllm tight replicas": Kind("vllm", replicas=(4,), tight=True),
    "vllm stages": Kind("vllm", stages=(2, 4)),
    "vllm stages burst": Kind("vllm", stages=(2, 4), burst=True),
    "vllm stages tight": Kind("vllm", stages=(2, 4), replicas=(1, 2), tight=True),
    "sarathi": Kind("sarathi", replicas=(1, 4)),
    "sarathi burst": Kind("sarathi", replicas=(1, 4), burst=True),
    "sarathi stages": Kind("sarathi", stages=(2, 4)),
    "sarathi stages burst": Kind("sarathi", stages=(2, 4), burst=True),
    "sarathi tight": Kind("sarathi", replicas=(1, 4), tight=True),
    "sarathi tight burst": Kind("sarathi", stages=(1, 2), tight=True, burst=True),
    "sarathi stages tight": Kind("sarathi", stages=(2, 4), tight=True),
    "orca": Kind("orca", stages=(1, 2, 4), replicas=(1, 2)),
    "orca burst": Kind("orca", stages=(1, 2, 4), burst=True),
    "faster_transformer": Kind("faster_transformer", stages=(1, 2, 4), replicas=(1, 3), equal=True),
    "faster_transformer burst": Kind("faster_transformer", stages=(1, 2), burst=True, equal=True),
}


def synthetic_tables(stages: int) -> CostTables:
    """Times in whole ticks of 2^-20 s: sums are exact in any order, so that ties stay ties."""
    tokens, chunk = np.arange(6001.0), np.arange(1025.0)[:, None]
    context, seqs = np.arange(160.0)[None, :], np.arange(130.0)[:, None]
    none = np.zeros(2)
    return CostTables(
        layer_s=TICK_S * (800 + 4 * np.floor(tokens / 8)),
        comm_s=TICK_S * (50 + np.floor(tokens / 8)),
        embedding_s=0 * tokens,
        send_s=TICK_S * (8 + np.floor(tokens / 4)),
        head_s=none,
        host_s=none,
        prefill_s=TICK_S * np.floor(chunk * (chunk / 2 + 64 * context) / 256),
        decode_s=TICK_S * 3 * seqs * (1 + context),
        stage_layers=np.full(stages, 4),
        rule=AttentionRule(MERGED, 64, 1.125),
    )


def synthetic_stage_times(tables: CostTables):
    """The same times read from a batch by the oracle."""
    merging = tables.rule.merge_factor

    def stage_time(batch, stage):
        f = features(batch)
        layer_s = tables.layer_s[f.tokens] + tables.comm_s[f.tokens]
        if f.prefills:
            layer_s += tables.prefill_s[f.chunk, f.context] * (merging if f.prefills > 1 else 1)
        if f.decodes:
            layer_s += tables.decode_s[f.decodes, f.mean_context] * (merging if f.decodes > 1 else 1)
        send_s = tables.send_s[f.tokens] if stage < len(tables.stage_layers) - 1 else 0.0
        return float(tables.stage_layers[stage] * layer_s + send_s)

    return stage_time


def random_workload(kind: Kind, rng: np.random.Generator) -> Workload:
    n = int(rng.integers(8, 48))
    prompt = rng.integers(1, rng.choice([20, 60, 200]), n)
    output = rng.integers(1, rng.choice([3, 20, 60]), n)
    if kind.equal or rng.random() < 0.2:
        prompt[:], output[:] = prompt[0], output[0]
    arrival_s = rng.random(n) * rng.choice([0.05, 0.3, 2.0])
    if kind.burst:
        arrival_s = rng.choice(np.append(0.0, np.round(rng.random(rng.integers(0, 3)), 3)), n)
    return Workload(np.sort(arrival_s), prompt, output)


def random_rules(kind: Kind, work: Workload, rng: np.random.Generator) -> Rules:
    """A cluster on which every request of the workload can end."""
    stages = int(rng.choice(kind.stages))
    longest = int((work.prompt_tokens + work.output_tokens).max())
    block_size = int(rng.choice([1, 4, 8, 16, 32]))
    max_tokens = -(-longest // block_size) * block_size * int(rng.choice([1, 2]))
    watermark, slots = float(rng.choice([0.0, 0.01, 0.05, 0.2])), int(rng.choice([1, 2, 3, 7, 29]))
    paged = -(-(longest + 1) // block_size) * rng.choice([1.0, 1.2, 1.5, 2.0] if kind.tight else [100.0])
    blocks = max_tokens // block_size * slots * stages
    budget = longest * int(rng.choice([1, 2, 50])) if kind.scheduler == "vllm" else int(rng.choice([4, 16, 64, 512]))
    return Rules(
        kind.scheduler,
        blocks=blocks if kind.scheduler in REQUEST_LEVEL else int(paged / (1 - watermark)) + 2,
        token_budget=budget,
        block_size=block_size,
        watermark=watermark,
        cap=int(rng.choice([1, 2, 3, 5, 16, 128]) * rng.choice([1, stages]) + stages - 1),
        stages=stages,
        replicas=int(rng.choice(kind.replicas)),
        router=str(rng.choice(["round_robin", "lor"])),
        max_tokens=max_tokens,
        slots=slots,
    )


def deployment(rules: Rules, tables: CostTables, model=MODEL) -> Deployment:
    gpu = catalog.gpu("A100-80GB")
    num_running, of_a_step = rules.cap, rules.cap // rules.stages
    max_model_len = min(rules.max_tokens, rules.blocks * rules.block_size)
    if rules.scheduler in REQUEST_LEVEL:
        num_running, of_a_step = max(rules.slots, rules.cap) * rules.stages, min(rules.slots, rules.cap)
    return Deployment(
        model,
        gpu,
        catalog.default_node(gpu, rules.stages),
        Parallelism(1, rules.stages, rules.replicas),
        EngineLimits(
            max_num_seqs=num_running,
            max_step_seqs=of_a_step,
            max_num_batched_tokens=rules.token_budget,
            block_size=rules.block_size,
            watermark=rules.watermark,
        ),
        replace(policy.scheduler(f"vidur_{rules.scheduler}"), router=ROUTERS[rules.router]),
        tables,
        KvPlan(rules.blocks, rules.block_size, 0.0, 0.0, 0.0, 0.0, planner="vidur"),
        max_model_len=max_model_len,
    )


def assert_same(work: Workload, rules: Rules, tables: CostTables, stage_time, engine: str, model=MODEL) -> int:
    """Engine and oracle agree; comes back with the restarts there were."""
    other = play(work.arrival_s, work.prompt_tokens, work.output_tokens, rules, stage_time)
    assert other.drained, rules
    own = simulate(work, deployment(rules, tables, model), engine=engine)
    requests = own.requests
    assert (requests.status == Status.FINISHED).all(), rules
    assert int(own.totals.steps.sum()) == other.iterations, rules
    np.testing.assert_array_equal(requests.preemptions, other.column("restarts"), err_msg=str(rules))
    times = {
        "completed_s": requests.finished_s,
        "scheduled_s": requests.scheduled_s,
        "prefilled_s": requests.first_token_s,
    }
    for name, column in times.items():
        np.testing.assert_allclose(column, other.column(name), rtol=1e-9, atol=0, err_msg=f"{name} {rules}")
    return int(other.column("restarts").sum())


@pytest.mark.parametrize("name", KINDS)
def test_engine_follows_vidurs_rules(name: str) -> None:
    kind, restarts = KINDS[name], 0
    for seed in range(24):
        rng = np.random.default_rng([seed, *name.encode()])
        work = random_workload(kind, rng)
        rules = random_rules(kind, work, rng)
        tables = synthetic_tables(rules.stages)
        engine = "reference" if seed < 2 else "kernel"
        restarts += assert_same(work, rules, tables, synthetic_stage_times(tables), engine)
    assert (restarts > 0) == kind.tight, "a tight kind that restarts no request tests nothing"


REAL = [
    ("Llama-2-7b-hf", 1, 1, Rules("vllm", blocks=400, token_budget=4096, cap=64)),
    ("Llama-2-7b-hf", 1, 1, Rules("orca", blocks=7424, max_tokens=4096, slots=29, replicas=2, router="lor")),
    ("Llama-2-70b-hf", 4, 1, Rules("sarathi", blocks=32768, token_budget=256, cap=48, replicas=4, router="lor")),
    ("Llama-2-70b-hf", 2, 2, Rules("vllm", blocks=32768, token_budget=4096, stages=2, cap=32)),
    ("Llama-2-70b-hf", 2, 2, Rules("sarathi", blocks=32768, token_budget=1000, stages=2, cap=24)),
    ("Llama-2-70b-hf", 2, 2, Rules("sarathi", blocks=32768, token_budget=512, stages=4)),
]


@pytest.mark.parametrize(("short", "tp", "pp", "rules"), REAL, ids=lambda v: getattr(v, "scheduler", str(v)))
def test_engine_follows_vidurs_rules_on_recorded_tables(shared, short, tp, pp, rules) -> None:
    rng = np.random.default_rng(7)
    work = Workload(np.sort(rng.random(60) * 10), rng.integers(1, 900, 60), np.minimum(rng.geometric(0.01, 60), 600))
    path = shared(f"golden/vidur/tables_{short}_tp{tp}_pp{pp}.npz")
    model = catalog.model(f"meta-llama/{short}")
    stage_time = recorded_stage_times(dict(np.load(path)), model.layers, rules.stages, "70b" in short)
    assert_same(work, rules, cost.vidur_tables(path, model, rules.stages), stage_time, "kernel", model)


RECORDED = [
    "g03_70b_tp2pp2_sarathi512_arxiv_q0.8",
    "g07_7b_tp1_sarathi512_uniform_4rep_rr_q20",
    "g08_7b_tp1_vllm_smallkv_restarts_conv_q3",
    "g10_7b_tp1_ft_fixed128_64_q10",
]


def rules_of(case: dict) -> Rules:
    cluster, summary = case["config"]["cluster_config"], case["summary"]
    scheduler = cluster["replica_scheduler_config"]
    return Rules(
        scheduler["name"],
        blocks=int(summary["kv_blocks_per_replica"]),
        token_budget=scheduler.get("chunk_size") or scheduler.get("max_tokens_in_batch") or 0,
        block_size=scheduler["block_size"],
        watermark=scheduler["watermark_blocks_fraction"],
        cap=scheduler["batch_size_cap"],
        stages=cluster["replica_config"]["num_pipeline_stages"],
        replicas=cluster["num_replicas"],
        router=cluster["global_scheduler_config"]["name"],
        max_tokens=case["config"]["request_generator_config"]["max_tokens"],
        slots=int(summary["max_batch_size_memory_planner_capped"]),
    )


@pytest.mark.parametrize("name", RECORDED)
def test_oracle_reproduces_recorded_runs(shared, name: str) -> None:
    with gzip.open(shared(f"golden/vidur/{name}.json.gz")) as file:
        case = json.load(file)
    replica = case["config"]["cluster_config"]["replica_config"]
    shape, rules = replica["model_config"], rules_of(case)
    short = replica["model_name"].split("/")[-1]
    tables = shared(f"golden/vidur/tables_{short}_tp{replica['tensor_parallel_size']}_pp{rules.stages}.npz")
    grouped = shape["num_q_heads"] > shape["num_kv_heads"]
    stage_time = recorded_stage_times(dict(np.load(tables)), shape["num_layers"], rules.stages, grouped)
    rows = sorted(case["requests"], key=lambda row: (row["arrived_at"], row["id"]))
    columns = [[row[key] for row in rows] for key in ("arrived_at", "prefill_tokens", "decode_tokens")]
    played = play(*columns, rules, stage_time)
    assert played.drained
    assert played.iterations == case["summary"]["iterations"]
    pairs = {
        "restarts": "num_restarts",
        "completed_s": "completed_at",
        "scheduled_s": "scheduled_at",
        "prefilled_s": "prefill_completed_at",
    }
    for own, other in pairs.items():
        np.testing.assert_allclose(played.column(own), [row[other] for row in rows], rtol=1e-12, atol=0)
