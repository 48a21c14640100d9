"""The rules of SGLang's scheduler are its own: equal steps in random worlds, compared one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from plugin_engines import ROOT

from lengthwise.engine._reference_sglang import Sequence, SglangLimits, SglangReplica

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORLDS = int(os.environ.get("LENGTHWISE_SGLANG_WORLDS", "100"))
SGLANG = Path(os.environ.get("LENGTHWISE_SGLANG", ROOT / ".engines" / "sglang-mem-cache"))
"""The part of SGLang's package that ``make engine`` unpacks."""


def world(seed):
    """Requests in a pool that a few of them fill, and every limit small enough to matter."""
    rng = np.random.default_rng(seed)
    exact, tight = rng.random() < 0.3, rng.random() < 0.7  # tight: memory is short, so that requests are retracted
    size = int(rng.choice([1, 4, 16]))
    tokens = int(rng.integers(120, 400 if tight else 600)) // size * size
    seqs = int(rng.integers(8, 30) if tight else rng.integers(1, 16))
    chunk = None if rng.random() < 0.25 else max(int(rng.integers(seqs, 120)), seqs + size) // size * size + size
    longest, often = max(4, tokens // (8 if tight else 2) - 2 * size), rng.uniform(0.3 if tight else 0.05, 1)
    requests, arrival = [], 0
    for _ in range(int(rng.integers(5, 60))):
        arrival += int(rng.geometric(often)) - 1
        prompt = int(rng.integers(1, longest))
        # SGLang lowers a limit to what an empty pool has. With ignore_eos it reserves a little more, or would be stuck.
        most = tokens - -(-prompt // size) * size - size - 1 - exact * (size + 1)
        output = int(min(rng.geometric(1 / 60), most))
        times = rng.uniform(1, 1.4 if tight else 6)
        cap = most if rng.random() < 0.1 and not tight else int(min(np.ceil(output * times), most))
        ignore_eos = bool(exact and rng.random() < 0.7)
        requests.append([arrival, prompt, cap if ignore_eos else output, cap, ignore_eos])
    return {
        "page_size": size, "pages": tokens // size, "max_num_seqs": seqs, "chunked_prefill_size": chunk,
        "max_prefill_tokens": int(rng.integers(40, 400)), "mixed": bool(chunk is not None and rng.random() < 0.4),
        "conservativeness": float(rng.choice([0.0, 0.1, 0.3, 1.0, 1.6])),
        "policy": str(rng.choice(["fcfs", "fcfs", "lof"])), "requests": requests,
        "overlap": bool(rng.random() < 0.5), "clip": int(rng.choice([20, 4096])),
    }  # fmt: skip


def own_steps(one):
    """The steps of a world by lengthwise's rules."""
    replica = SglangReplica(
        SglangLimits(
            one["page_size"], one["pages"], one["max_num_seqs"], one["max_prefill_tokens"],
            one["chunked_prefill_size"], one["mixed"], one["conservativeness"], one["policy"],
            one["clip"],
        )
    )  # fmt: skip
    requests = one["requests"]
    outputs = {i: output for i, (_, _, output, _, _) in enumerate(requests)}
    sequences = [Sequence(i, prompt, cap, exact) for i, (_, prompt, _, cap, exact) in enumerate(requests)]
    lines, sent, last = [], 0, None
    while sent < len(requests) or any(q.generated < outputs[q.number] for q in sequences):
        while sent < len(requests) and requests[sent][0] <= len(lines):
            replica.enter(sequences[sent])
            sent += 1
        step = replica.form()
        kind = ("mixed" if step.decodes else "prefill") if step.prompts else "decode" if step.decodes else "idle"
        tokens = [[q.number, count] for q, count in step.prompts] + [[q.number, 1] for q in step.decodes]
        if (ended := last if one["overlap"] else step) is not None:
            replica.end(ended, outputs)
        last = step
        lines.append([kind, tokens, [q.number for q in step.retracted], replica.free_tokens, replica.ratio.now])
    return lines


def sglang_steps(worlds, python):
    """The steps of SGLang's own functions in each world."""
    assert SGLANG.exists(), f"no {SGLANG}: make engine"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worlds.json"
        path.write_text(json.dumps(worlds))
        words = [python, str(Path(__file__).parent / "sglang_steps.py"), str(SGLANG), str(path)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=3000, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return json.loads(ran.stdout.splitlines()[-1])


def compared(seeds, python):
    """Compare all steps of random worlds. Return how many there are of each kind, and the retractions."""
    worlds = [world(seed) for seed in seeds]
    counts = Counter()
    for seed, one, expected in zip(seeds, worlds, sglang_steps(worlds, python), strict=True):
        for number, (found, of_sglang) in enumerate(zip(own_steps(one), expected, strict=True)):
            assert found == of_sglang, (seed, number, found, of_sglang)
            counts[found[0]] += 1
            counts["retractions"] += len(found[2])
        counts["steps"] += len(expected)
        counts["chunks"] += sum(len(line[1]) for line in expected if line[0] != "decode")
    return counts


def test_every_step_is_that_of_sglang():
    counts = compared(range(WORLDS), sys.executable)
    assert counts["steps"] > 50 * WORLDS
    assert min(counts[kind] for kind in ("prefill", "mixed", "decode", "idle", "retractions")) > WORLDS / 2, counts
