"""EPLB places experts as vLLM's ``DefaultEplbPolicy``: every slot of random loads, from vLLM's own module."""

import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from plugin_engines import ROOT

from lengthwise.cost.experts import rebalance_experts

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CASES = 200
SOURCES = ROOT / ".engines" / "vllm" / "bin" / "python"
SHAPES = [(8, 2), (16, 4), (60, 6), (64, 8), (128, 8), (160, 8), (256, 8), (256, 1), (384, 1)]  # experts, groups
SCRIPT = """
import sys
import numpy as np
import torch
from vllm.distributed.eplb.policy import DefaultEplbPolicy

given = np.load(sys.argv[1])
placed = {}
for name in given.files:
    if name.startswith("load"):
        sizes = given[name.replace("load", "sizes")].tolist()
        placed[name] = DefaultEplbPolicy.rebalance_experts(torch.from_numpy(given[name]), *sizes).numpy()
np.savez(sys.argv[2], **placed)
"""


def case(seed):
    """Return ([layers, experts] loads, (slots, groups, nodes, GPUs)): counts of tokens with ties, or any loads."""
    rng = np.random.default_rng(seed)
    experts, groups = SHAPES[seed % len(SHAPES)]
    nodes = int(rng.choice([1, 2, 4, 8]))
    gpus = nodes * int(rng.choice([n for n in (1, 2, 4, 8) if experts >= nodes * n] or [1]))
    slots = -(-experts // gpus) * gpus + gpus * int(rng.integers(0, 5))
    popularity = rng.gamma(rng.choice([0.1, 1.0, 5.0]), size=(int(rng.integers(1, 6)), experts))
    load = rng.poisson(popularity * rng.choice([2, 1000])) if rng.random() < 0.5 else popularity
    return load.astype(np.float32), (slots, groups, nodes, gpus)


def compared(seeds, python=str(SOURCES)):
    """Return (number of slots, number of slots whose expert differs from vLLM's)."""
    cases = [case(seed) for seed in seeds]
    with tempfile.TemporaryDirectory() as folder:
        loads, placed = Path(folder) / "loads.npz", Path(folder) / "placed.npz"
        arrays = {f"load{i}": load for i, (load, _) in enumerate(cases)}
        np.savez(loads, **arrays, **{f"sizes{i}": sizes for i, (_, sizes) in enumerate(cases)})
        words = [str(python), "-c", SCRIPT, str(loads), str(placed)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=3000, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        expected = np.load(placed)
        pairs = [(rebalance_experts(load, *sizes), expected[f"load{i}"]) for i, (load, sizes) in enumerate(cases)]
    return sum(own.size for own, _ in pairs), sum(int((own != of).sum()) for own, of in pairs)


def test_every_slot_has_the_expert_that_vllm_places_there(engine_python):
    slots, different = compared(range(CASES), engine_python)
    assert slots > 100 * CASES
    assert different == 0
