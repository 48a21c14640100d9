"""Speed-ups of EAGLE against step times that vLLM measured (Liu et al., "Speculative Decoding", arXiv:2601.11580)."""

from __future__ import annotations

from itertools import product

import numpy as np

from lengthwise.engine import deploy, simulate
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.speculation import Speculation
from lengthwise.schema.workload import Workload

ACCEPTED = {"sharegpt": (0.62, 0.38, 0.25), "cnn": (0.65, 0.41, 0.27), "gsm8k": (0.67, 0.44, 0.28)}
"""Share of the steps in which EAGLE's first, second and third token is accepted, counted in that paper's data."""
VERIFY_S = np.array([3.926e-8, 2.101e-5, 5.886e-3 + 1.207e-3])
DRAFT_S = np.array([2.378e-9, 0.0, 2.139e-3])
"""That paper's fits for Llama-3.1-8B on an H100 with vLLM 0.10, by KV tokens, tokens of a step, and for each step."""
PASS_S = 1e-4
"""A third of what its drafter takes at batch 1 (2.14 ms) beyond the roofline's three passes (1.85 ms)."""
PROMPT, OUTPUT = 500, 300


def speedups(batches):
    """Throughput with three tokens of EAGLE over that without, simulated and by the measured fits."""
    found = {}
    for (name, (first, second, third)), batch in product(ACCEPTED.items(), batches):
        chosen = Speculation("eagle", 3, (first, second / first, third / second), pass_s=PASS_S)
        n, tokens, kv = 8 * batch, 1 + first + second + third, batch * (PROMPT + OUTPUT / 2)
        work = Workload(np.zeros(n), np.full(n, PROMPT), np.full(n, OUTPUT), concurrency=batch)
        limits = EngineLimits(max_num_batched_tokens=8192, max_model_len=4096)
        runs = [
            simulate(work, deploy("llama-3.1-8b", "H100", host="vllm", limits=limits, speculation=one), max_log_steps=0)
            for one in (None, chosen)
        ]
        without, verify = (float(VERIFY_S @ (kv, number, 1)) for number in (batch, 4 * batch))
        own, measured = runs[0].end_s / runs[1].end_s, tokens * without / (verify + float(DRAFT_S @ (kv, 0, 1)))
        found[f"{name}.{batch}"] = {
            "simulated": own,
            "measured": measured,
            "error": abs(own / measured - 1),
            "tokens_per_step_error": abs(runs[1].speculation.tokens_per_step / tokens - 1),
        }
    return found


def test_speedups_are_those_measured():
    found = speedups((8, 64)).values()
    assert max(one["error"] for one in found) < 0.1
    assert max(one["tokens_per_step_error"] for one in found) < 0.02
