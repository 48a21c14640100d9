"""Run vLLM's real scheduler classes in RRA's phases, without a model, in the engine's environment.

python scheduled_rra.py MODEL_DIR: asynchronous scheduling (which vLLM's CPU build turns off) and the plain one, both
scheduling policies; with enough memory for all requests, with too little, with a small max_num_seqs, and with aborts.
Prints one JSON object.
"""

import itertools
import json
import random
import sys
from collections import deque

from scheduled import BLOCK, FIRST, Worker, request, scheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import RequestStatus

from lengthwise.gateway.plugin import RraScheduler

BATCH, STEPS = 2, 5


def world(model, asynchronous, policy, seed, *, tight, **settings):
    """Requests, all at once where there is room; what each got, and the phases."""
    random_, worker = random.Random(seed), Worker()
    made = scheduler(model, asynchronous, RraScheduler, policy, prefill_batch=BATCH, decode_steps=STEPS, **settings)
    hasher, depth = get_request_block_hasher(BLOCK, sha256), 2 if asynchronous else 1
    longest = [3, 8, 40, 120] if tight else [3, 8, 12]
    coming = deque(
        request(f"r{k}", random_.randint(5, 90 if tight else 30), random_.choice(longest), hasher) for k in range(40)
    )
    everyone, aborted, flying, mixed = {one.request_id: one for one in coming}, set(), deque(), 0
    while not tight and coming:
        made.add_request(coming.popleft())
    for step in range(6000):
        if coming and step % 6 == 0:
            made.add_request(coming.popleft())
        if tight and step % 97 == 50 and made.requests:
            name = random_.choice(sorted(made.requests))
            made.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            aborted.add(name)
        decoding = {one.request_id for one in made.running if not one.is_prefill_chunk}
        reported = made.schedule()
        kinds = {name in decoding for name in reported.num_scheduled_tokens}
        mixed += len(kinds) > 1
        flying.append((reported, worker.run(reported)))
        if len(flying) >= depth:
            made.update_from_output(*flying.popleft())
        if not coming and not made.requests:
            break
    while flying:
        made.update_from_output(*flying.popleft())
    complete = {
        name: list(one.output_token_ids) == list(range(FIRST, FIRST + one.max_tokens))
        for name, one in everyone.items()
        if name not in aborted
    }
    phases = list(made.lengthwise.tracker.phases) if made.lengthwise else []
    return {
        "satisfied": made.lengthwise is not None,
        "wrong": sorted(name for name, right in complete.items() if not right),
        "unfinished": sorted(made.requests),
        "expected": len(complete),
        "mixed": mixed,
        "phases": [[one.admitted, one.decode_steps, one.decode_batch] for one in phases],
        "preemptions": sum(one.num_preemptions for one in everyone.values()),
        "free_blocks": made.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


def main(model):
    init_none_hash(sha256)
    found = {}
    for asynchronous, policy, tight in itertools.product((False, True), ("fcfs", "priority"), (False, True)):
        name = f"{'async' if asynchronous else 'plain'} {policy} {'tight' if tight else 'roomy'}"
        found[name] = world(model, asynchronous, policy, 3, tight=tight)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
