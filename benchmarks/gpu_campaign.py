"""A GPU's round: profile a Llama of 8 billion random weights, serve it for real, calibrate, simulate, compare.

    python benchmarks/gpu_campaign.py [--out FOLDER]              under 8 minutes, nobody needed
    python benchmarks/gpu_campaign.py --device cpu --tiny          the same code without a GPU, two minutes

It needs torch and transformers beside lengthwise, in one environment (or the engine's in another:
--engine-python), no network and no downloads. The engine is transformers' continuous batching. The profile
(Parquet), each run's records and rows.json are left in the folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "gpu"
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""Shapes of Meta's Llama 3 8B, as its config.json states them; no weight of it is used."""
TINY = LLAMA_3_8B | {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Plan:
    """Sizes of a campaign."""

    config: Mapping[str, Any]
    name: str
    dtype: str
    prompt: tuple[float, float, int, int]
    output: tuple[float, float, int, int]
    seqs: int
    step_tokens: int
    blocks: int
    max_model_len: int
    profile_s: float
    static_s: float
    seconds: float
    repeats: int


BIG = Plan(
    LLAMA_3_8B, "llama-3-8b-shaped", "bfloat16", (256, 0.7, 16, 1500), (96, 0.6, 8, 400),
    seqs=32, step_tokens=512, blocks=2048, max_model_len=2048,
    profile_s=120.0, static_s=20.0, seconds=25.0, repeats=2,
)  # fmt: skip
SMALL = Plan(
    TINY, "tiny-llama", "float32", (64, 0.7, 8, 500), (24, 0.6, 4, 120),
    seqs=16, step_tokens=512, blocks=512, max_model_len=1024,
    profile_s=20.0, static_s=5.0, seconds=6.0, repeats=1,
)  # fmt: skip
BLOCK = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for profile, records and rows")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model: to try the script")
    parser.add_argument("--engine-python", default=sys.executable, help="has torch and transformers")
    given = parser.parse_args()
    lacks = missing(given)
    if lacks:
        print(lacks, file=sys.stderr)
        return 2
    Campaign(given.out.resolve(), given.device, SMALL if given.tiny else BIG, given.engine_python).run()
    return 0


def missing(given: argparse.Namespace) -> str:
    """What this machine lacks for the campaign, in a sentence; "" if nothing."""
    if importlib.util.find_spec("torch") is None:
        return "the campaign needs torch: pip install 'lengthwise[torch]' transformers"
    own = given.engine_python == sys.executable
    if own and importlib.util.find_spec("transformers") is None:
        return "the campaign needs transformers: pip install transformers, or give --engine-python"
    import torch

    if given.device != "cpu" and not torch.cuda.is_available():
        return (
            "the campaign needs a GPU that torch can use; torch sees none here. Run it on a machine with one, "
            "or try the script with --device cpu --tiny"
        )
    return ""


class Campaign:
    """One round on one device, its files in a folder."""

    def __init__(self, out: Path, device: str, plan: Plan, python: str) -> None:
        from _device import device_of

        out.mkdir(parents=True, exist_ok=True)
        self.out, self.device, self.plan, self.python = out, device, plan, python
        self.start = time.monotonic()
        self.gpu = device_of(device, plan.dtype)
        self.config = out / f"{plan.name}.json"
        self.config.write_text(json.dumps(dict(plan.config), indent=1))

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.start:6.1f} s  {text}", file=sys.stderr, flush=True)

    def run(self) -> None:
        """Profile, measure, calibrate, simulate, compare; every file as soon as it is there."""
        from _circle import Setting, deployment_of

        plan = self.plan
        setting = Setting("fifo", plan.seqs, plan.step_tokens)
        limits = replace(
            setting.limits(plan.max_model_len, BLOCK), weight_dtype=plan.dtype, kv_dtype=plan.dtype
        )
        base = deployment_of(str(self.config), self.gpu, limits, plan.blocks)
        tables = self._profiled(base)
        runs, facts = self._measured(setting)
        self._compared(base, tables, runs, facts)

    def _profiled(self, d: Any) -> Any:
        from lengthwise.cost.estimators import fit_profile
        from lengthwise.cost.profiles import write_profile
        from lengthwise.measure.operators import measure_profile

        words = {"threads": 1} if self.device == "cpu" else {}
        profile = measure_profile(
            d.model,
            device=self.device,
            dtype=self.plan.dtype,
            budget_s=self.plan.profile_s,
            max_tokens=self.plan.step_tokens,
            max_seqs=self.plan.seqs,
            max_context=self.plan.max_model_len,
            **words,
        )
        write_profile(profile, self.out / "profile.parquet")
        self.say(f"profile of {len(profile)} points")
        free(self.device)
        tables, _ = fit_profile(profile, d.model, d.gpu, d.node, d.parallel, d.limits, d.max_model_len)
        return tables

    def _measured(self, setting: Any) -> tuple[list[Any], dict[str, Any]]:
        import _circle
        import _continuous
        import numpy as np

        from lengthwise.measure import write_records

        plan = self.plan
        lengths = _circle.Lengths(plan.prompt, plan.output)
        flags = {
            "device": self.device,
            "dtype": plan.dtype,
            "attention": "paged|sdpa,sdpa",
            "batch-tokens": plan.step_tokens,
            "seqs": plan.seqs,
            "blocks": plan.blocks,
            "block-size": BLOCK,
        }
        with _continuous.started(self.python, self.config, flags) as engine:
            self.say(f"{engine.facts['engine']} with {engine.facts['attention']} on {engine.facts['device']}")
            for _ in range(2):  # the first is the engine's own warm-up
                first = engine.run(lengths.workload(plan.seqs, 0, None, "warm-up"))
            rate_rps = plan.seqs / float(np.nanmax(first.records.requests.finished_s))
            runs = _circle.measure_loads(
                engine.run,
                setting,
                lengths,
                static_n=min(1000, max(80, round(rate_rps * plan.static_s))),
                seconds=plan.seconds,
                repeats=plan.repeats,
                kept=lambda run: write_records(run.measured, self.out / f"{run.name}.measured.parquet"),
                say=self.say,
            )
            return runs, dict(engine.facts)

    def _compared(self, base: Any, tables: Any, runs: list[Any], facts: dict[str, Any]) -> None:
        import _circle
        from _harness import strict_json

        from lengthwise.measure import write_records

        learnt = [run for run in runs if run.load in _circle.LEARNT]
        held = [run for run in runs if run.load not in _circle.LEARNT]
        started = time.monotonic()
        found = _circle.calibrated(learnt, held, replace(base, cost=tables))
        took_s = time.monotonic() - started
        self.say(f"calibrated on {len(learnt)} runs in {took_s:.1f} s")
        told = {
            "calibrated": _circle.errors(base, found.tables, runs, found.client_s),
            "profile": _circle.errors(base, tables, runs),
            "roofline": _circle.errors(base, base.cost, runs),
        }
        for run in runs:
            records = _circle.simulated(replace(base, cost=found.tables), run)
            write_records(_circle.as_simulated(records, run), self.out / f"{run.name}.simulated.parquet")
        rows = _circle.rows(f"fidelity.gpu.{self.plan.name}", told, runs, held)
        rows[f"fidelity.gpu.{self.plan.name}.calibration"] = {
            "value": round(took_s, 2),
            "unit": "s",
            "details": {
                "learnt_of": [run.name for run in learnt],
                "client_s": found.client_s,
                "parameters": [asdict(p) for p in found.parameters],
                "scores": [asdict(s) for s in found.scores],
                "notes": list(found.notes),
                "engine": facts,
                "machine": {"device": self.gpu.name, "cores": os.cpu_count(), "python": platform.python_version()},
                "seconds": round(time.monotonic() - self.start, 1),
            },
        }  # fmt: skip
        text = "".join(strict_json({"name": name} | row) + "\n" for name, row in rows.items())
        (self.out / "rows.json").write_text(text)
        for name, row in rows.items():
            print(f"{name:52} {row['value']:10.4g} {row['unit']}")
        self.say("done")


def free(device: str) -> None:
    """Gives the memory of the profile back before the engine, another process, asks for it."""
    if device != "cpu":
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
