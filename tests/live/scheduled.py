"""vLLM's real scheduler classes driven without a model: run in the engine's environment.

python scheduled.py MODEL_DIR: asynchronous scheduling (which vLLM's CPU build turns off) and the plain one, with
the plug-in, under cuts, want of memory and aborts. What a worker samples is the position of the token, so that
a token lost or done twice shows. Prints one JSON object.
"""

import json
import random
import sys
from collections import deque

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lengthwise.gateway.plugin import LengthScheduler

BLOCK, BLOCKS, SLOTS, LENGTH = 16, 24, 4, 256
FIRST = 1000


def scheduler(model, asynchronous, kind=LengthScheduler, policy="fcfs", **settings):
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", max_model_len=LENGTH, seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=SLOTS,
            max_num_batched_tokens=64,
            max_model_len=LENGTH,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=policy,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        additional_config={"lengthwise": settings},
    )
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


class Worker:
    """Computes what is scheduled, and samples positions."""

    def __init__(self):
        self.lengths, self.outputs = {}, {}

    def run(self, report):
        for new in report.scheduled_new_reqs:
            self.lengths[new.req_id] = len(new.prompt_token_ids)
            self.outputs.setdefault(new.req_id, 0)
        cached = report.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in report.scheduled_new_reqs}
        names, sampled = list(report.num_scheduled_tokens), []
        for name in names:
            end = computed[name] + report.num_scheduled_tokens[name]
            total = self.lengths[name] + self.outputs[name]
            assert end <= total, (name, end, total)
            sampled.append([FIRST + self.outputs[name]] if end == total else [])
            self.outputs[name] += end == total
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: k for k, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def request(name, prompt, tokens, hasher, predicted=None):
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, temperature=0, extra_args={"lengthwise_predicted": predicted or tokens}
    )
    return Request(name, [(k * 7 + prompt) % 900 for k in range(prompt)], params, None, block_hasher=hasher)


def world(model, asynchronous, seed, exact=True, **settings):
    """Requests that come over time, some aborted; what each got. Unless ``exact``, each is predicted to end at once."""
    random_, made, worker = random.Random(seed), scheduler(model, asynchronous, **settings), Worker()
    assert isinstance(made, AsyncScheduler) == asynchronous
    assert made.lengthwise is not None
    hasher, depth = get_request_block_hasher(BLOCK, sha256), 2 if asynchronous else 1
    shapes = [(random_.randint(5, 90), random_.choice([3, 8, 40, 120])) for _ in range(40)]
    coming = deque(
        request(f"r{k}", prompt, tokens, hasher, tokens if exact else 1) for k, (prompt, tokens) in enumerate(shapes)
    )
    everyone, aborted, flying, finished = {one.request_id: one for one in coming}, set(), deque(), []
    for step in range(6000):
        if coming and step % 6 == 0:
            made.add_request(coming.popleft())
        if step % 97 == 50 and made.requests:
            name = random_.choice(sorted(made.requests))
            made.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            aborted.add(name)
        reported = made.schedule()
        flying.append((reported, worker.run(reported)))
        if len(flying) >= depth:
            for outputs in made.update_from_output(*flying.popleft()).values():
                finished += [one.request_id for one in outputs.outputs if one.finish_reason is not None]
        if not coming and not made.requests:
            break
    complete = {
        name: list(one.output_token_ids) == list(range(FIRST, FIRST + one.max_tokens))
        for name, one in everyone.items()
        if name not in aborted
    }
    registry = made.lengthwise.registry if made.lengthwise else None
    return {
        "ordered": made.lengthwise is not None,
        "wrong": sorted(name for name, right in complete.items() if not right),
        "unfinished": sorted(made.requests),
        "finished": len(set(finished) - aborted),
        "expected": len(complete),
        "preemptions": sum(one.num_preemptions for one in everyone.values()),
        "cuts": sum(registry.entry(one).preemptions for one in everyone.values()) if registry else 0,
        "margin": made.lengthwise.gate.margin if made.lengthwise and made.lengthwise.gate else 0.0,
        "free_blocks": made.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


def main(model):
    init_none_hash(sha256)
    found = {}
    for asynchronous in (False, True):
        for preemption in ("never", "worth(factor=0)"):
            for seed in range(2):
                name = f"{'async' if asynchronous else 'plain'} {preemption} {seed}"
                found[name] = world(
                    model,
                    asynchronous,
                    seed,
                    preemption=preemption,
                    window_tokens=4,
                    preemptions_per_s=1e9,
                    max_wait_s=1e9,
                )
        for predicted, share in (("exact", 0.0), ("short", 0.0), ("adapting", 0.2)):
            settings = {"preemption": "never", "reserve": True, "max_recompute_share": share}
            found[f"{'async' if asynchronous else 'plain'} reserve {predicted}"] = world(
                model, asynchronous, 0, exact=predicted == "exact", **settings
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
