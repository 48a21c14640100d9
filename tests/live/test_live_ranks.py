"""The router ``vllm_internal`` chooses as vLLM's own internal load balancer between data-parallel ranks."""

import json
import subprocess

import numpy as np
import pytest

from lengthwise import policy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CASES = 2000
SCRIPT = """
import json, sys
from collections import Counter
from types import SimpleNamespace
from vllm.v1.engine.core_client import DPLBAsyncMPClient

request = SimpleNamespace(request_id="r", data_parallel_rank=None, pooling_params=None)
chosen = []
for number, waiting, running, usage in json.load(sys.stdin):
    names = [str(i).encode() for i in range(len(waiting))]
    client = SimpleNamespace(
        client_count=1, reqs_in_flight={}, core_engines=names, eng_start_index=number % len(names),
        engine_inflight=Counter({name: w + r for name, w, r in zip(names, waiting, running)}),
        lb_engines=[list(one) for one in zip(waiting, running, usage)],
    )
    chosen.append(int(DPLBAsyncMPClient.get_core_engine_for_request(client, request)))
json.dump(chosen, sys.stdout)
"""


def test_requests_go_to_the_ranks_that_vllm_chooses(engine_python):
    rng, choose, cases, own = np.random.default_rng(0), policy.known("router")["vllm_internal"].function, [], []
    for number in range(CASES):
        ranks, total = int(rng.integers(2, 17)), int(rng.choice([10, 1000, 29163]))
        waiting = rng.integers(0, rng.choice([1, 3, 40]), ranks)
        running, free = rng.integers(0, rng.choice([2, 10, 256]), ranks), rng.integers(0, total + 1, ranks)
        own.append(choose(number, total, waiting, running, free))
        cases.append([number, waiting.tolist(), running.tolist(), (1.0 - free / total).tolist()])
    words = [str(engine_python), "-c", SCRIPT]
    ran = subprocess.run(words, input=json.dumps(cases), capture_output=True, text=True, timeout=3000, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert own == json.loads(ran.stdout.splitlines()[-1])
    assert len(set(own)) > 10
