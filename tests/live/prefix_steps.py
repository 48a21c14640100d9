"""vLLM's own scheduler with its prefix cache, stepped without a model: run in the engine's environment.

python prefix_steps.py MODEL_DIR WORLDS: reads a JSON list of worlds and prints a JSON list of their steps. Every step
lasts one second. A step is [time, free blocks, [[request, tokens], ...], [preempted request, ...], [[admitted request,
cached tokens], ...]]. In a world with ``async_scheduling``, vLLM forms a step while the one before it runs. In a world
with ``offload_blocks``, vLLM's offloading connector keeps so many blocks in CPU memory. Its stores end with their step,
and its loads ``load_s`` after they began. With ``storage``, vLLM's tiering
manager keeps a storage behind it, whose jobs take ``read_s`` and ``write_s``. In a world with ``layers`` (how many of
each kind, how many KV heads of which size, numbers of a state), vLLM's hybrid KV cache manager groups them: the first
line is [layers of a group, groups, blocks in ``memory`` bytes], and the others also have [[request, its blocks], ...].
In a world with ``speculation``, decodes verify proposed tokens, and each request has its ``draws``: by the tokens that
it has generated and by whether its last verification accepted any (0: there was none, 1: no, 2: yes), how many tokens
are proposed for its next step, and how many of them are accepted.
"""

import heapq
import itertools
import json
import sys
from collections import deque
from pathlib import Path

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

STOP = 5


class Region:
    """The memory of a CPU tier: one byte for each chunk, since nothing is moved."""

    def __init__(self, chunks):
        self.chunks = chunks

    def create_kv_memoryview(self):
        return memoryview(bytearray(self.chunks)).cast("B", shape=[self.chunks, 1])


class Storage(SecondaryTierManager):
    """A storage without a limit that answers at once and moves jobs side by side."""

    def __init__(self, world, view):
        super().__init__(None, view, "storage")
        self.world, self.ready_s, self.jobs, self.time = world, {}, {}, 0

    def lookup(self, key, _request):
        found = key in self.ready_s and self.ready_s[key] <= self.time
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job):
        new = [key for key in job.keys if key not in self.ready_s]
        self.ready_s |= dict.fromkeys(new, self.time + self.world["write_s"])
        self.jobs[job.job_id] = self.time + (self.world["write_s"] if new else 0), False

    def submit_load(self, job):
        self.jobs[job.job_id] = self.time + self.world["read_s"], True

    def get_finished_jobs(self):
        completed = [number for number, (end_s, _) in self.jobs.items() if end_s <= self.time]
        for number in completed:
            del self.jobs[number]
        return [JobResult(number, success=True) for number in completed]

    def on_new_request(self, _request):
        return RequestOffloadingContext()

    def drain_jobs(self):
        """There is nothing to wait for."""

    def ends_s(self, *, only_reads):
        """Return when jobs end; ``only_reads``: those that bring chunks to CPU memory, for which requests wait."""
        return [end_s for end_s, is_read in self.jobs.values() if is_read or not only_reads]


def manager_of(world):
    if not world["storage"]:
        return CPUOffloadingManager(world["offload_blocks"])
    cpu = CPUPrimaryTierOffloadingManager(world["offload_blocks"], Region(world["offload_blocks"]))
    return TieringOffloadingManager(cpu, [Storage(world, cpu.get_kv_memoryview())])


def groups_of(config, world):
    """vLLM's groups of the world's layers."""
    layers, size = world["layers"], world["block_size"]
    shape = {"block_size": size, "num_kv_heads": layers["kv_heads"], "head_size": layers["head_dim"]}
    shape["dtype"] = torch.bfloat16
    full = FullAttentionSpec(**shape)
    state = MambaSpec(
        block_size=size if world["caching"] else world["max_model_len"],
        shapes=((layers["state_elements"],),),
        dtypes=(torch.bfloat16,),
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="align" if world["caching"] else "none",
    )
    specs = {f"state.{k}": state for k in range(layers["states"])}  # Models with states begin with such a layer, too.
    if layers["local"]:  # Models with windows or chunks begin with such a layer.
        kind, name = (SlidingWindowSpec, "sliding_window")
        if layers["chunked"]:
            kind, name = ChunkedLocalAttentionSpec, "attention_chunk_size"
        specs |= {f"local.{k}": kind(**shape, **{name: layers["local_tokens"]}) for k in range(layers["local"])}
    specs |= {f"full.{k}": full for k in range(layers["full"])}
    config.cache_config.mamba_cache_mode = "align" if world["caching"] and layers["states"] else "none"
    config.cache_config.kv_cache_layout = "LBNHC"
    return get_kv_cache_groups(config, specs)


def scheduler(model, world):
    size, blocks = world["block_size"], world["blocks"] + 1  # vLLM keeps one block as the null block
    tier = None
    if world["offload_blocks"]:
        settings = {"cpu_bytes_to_use": 2**30, "offload_prompt_only": not world["offload_outputs"]}
        tier = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=settings
        )
    config = VllmConfig(
        kv_transfer_config=tier,
        model_config=ModelConfig(model=model, dtype="float32", max_model_len=world["max_model_len"], seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=world["max_num_seqs"],
            max_num_batched_tokens=world["max_num_batched_tokens"],
            max_model_len=world["max_model_len"],
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=world.get("policy", "fcfs"),
            long_prefill_token_threshold=world.get("long_prefill_token_threshold", 0),
        ),
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=world["caching"]),
    )
    asynchronous = world.get("async_scheduling", False)
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = blocks
    if chosen := world.get("speculation"):
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=chosen["num_speculative_tokens"],
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    register_all_kvcache_specs(config)
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = groups_of(config, world) if "layers" in world else [KVCacheGroupSpec(["layer"], spec)]
    cache = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
    )
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
    made = (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        log_stats=False,
    )
    if chosen and chosen["method"] == "eagle":  # whose head would have to be loaded
        made.num_lookahead_tokens = chosen["num_speculative_tokens"]
        coordinator = made.kv_cache_manager.coordinator
        made.use_eagle_block_drop = coordinator.single_type_managers[0].use_eagle = True
        coordinator.eagle_group_ids = {0}
    if tier:
        made.connector.connector_scheduler.manager = manager_of(world)
        build = made.connector.build_connector_meta

        def in_order(report):
            # A set: requests that end with one step would count as used in the order of their names' hashes.
            report.finished_req_ids = dict.fromkeys(sorted(report.finished_req_ids, key=int))
            return build(report)

        made.connector.build_connector_meta = in_order
    return made


class Drafts:
    """Which tokens are proposed and accepted, by the ``draws`` of the requests."""

    def __init__(self, made, world):
        self.made, self.specs, self.speculates = made, world["requests"], "speculation" in world
        self.decoding, self.hits = set(), {}

    def accepted(self, name, report, generated):
        """Return how many proposed tokens the step accepts of a request that gets a token from it."""
        if not self.speculates:
            return 0
        if name not in self.decoding:  # Its prompt is complete.
            self.decoding.add(name)
            return 0
        drafts = len(report.scheduled_spec_decode_tokens.get(name, ()))
        found = min(drafts, self.specs[int(name)]["draws"][generated][self.hits.get(name, 0)][1])
        self.hits[name] = 1 + (found > 0)
        return found

    def propose(self, output, sampled):
        """Propose tokens for the next step of each request that got one."""
        if self.speculates:
            pairs = zip(output.req_ids, output.sampled_token_ids, strict=True)
            names = [name for name, tokens in pairs if tokens and name in self.made.requests]
            numbers = [self.specs[int(name)]["draws"][sampled[name]][self.hits.get(name, 0)][0] for name in names]
            self.made.update_draft_token_ids(DraftTokenIds(names, [[1] * number for number in numbers]))


class Transfers:
    """The jobs of the offloading connector, which a worker would move."""

    def __init__(self, made, load_s):
        self.made, self.load_s, self.stores, self.loads = made, load_s, [], {}
        self.manager = made.connector.connector_scheduler.manager if made.connector else None
        self.storages = getattr(self.manager, "secondary_tiers", [])

    def start(self, report, time):
        jobs = report.kv_connector_metadata
        if jobs is not None:
            self.stores += jobs.store_jobs
            self.loads |= {number: (time + self.load_s, job.req_id) for number, job in jobs.load_jobs.items()}

    def next_end_s(self, coming):
        """Return when the first load ends or the first request comes, or 0 if nothing waits for that."""
        if self.stores:
            return 0
        times = [end_s for end_s, _ in self.loads.values()] + [one[0] for one in coming[:1]]
        for storage in self.storages:
            times += storage.ends_s(only_reads=bool(self.made.requests))
        return min(times, default=0)

    def end(self, time):
        """Report the stores, and the loads that have ended by now."""
        for storage in self.storages:
            storage.time = time
            # Else it looks for ended jobs a step later where the step before has stored blocks.
            self.manager._processed_jobs_this_step = False  # noqa: SLF001 - vLLM's
        loaded = [number for number, (end_s, _) in self.loads.items() if end_s <= time]
        meta = OffloadingWorkerMetadata()
        for number in (*self.stores, *loaded):
            meta.mark_completed(number)
        requests = {self.loads.pop(number)[1] for number in loaded}
        if self.stores or requests:
            output = KVConnectorOutput(finished_recving=requests, kv_connector_worker_meta=meta)
            self.made._update_from_kv_xfer_finished(output)  # noqa: SLF001 - vLLM's
        self.stores = []


def prompt_of(one, world, requests, fresh):
    """The tokens of a prompt: those of the turn before or of its shared blocks, and tokens that no other has."""
    tokens, size = [], world["block_tokens"]
    if one["previous_turn"] >= 0:
        tokens = list(requests[one["previous_turn"]].all_token_ids)
    for number in one["block_ids"]:
        tokens += range(number * size, (number + 1) * size)
    tokens = tokens[: one["prompt"]]
    return tokens + [next(fresh) for _ in range(one["prompt"] - len(tokens))]


def request_of(i, world, requests, arrival, fresh):
    """A request that ends at ``output`` tokens: by its ``max_tokens``, or before them by the token that stops it."""
    one = world["requests"][i]
    params = SamplingParams(max_tokens=one.get("max_tokens", one["output"]), stop_token_ids=[STOP], temperature=0)
    hasher, prompt = get_request_block_hasher(world["block_size"], sha256), prompt_of(one, world, requests, fresh)
    priority = one.get("priority", 0)  # whose ties vLLM breaks by arrival and by the order of the names
    return Request(f"{i:06}", prompt, params, None, arrival_time=arrival, priority=priority, block_hasher=hasher)


def output_of(made, report, specs, sampled, fresh, drafts):
    """What a worker returns: a token for each request whose known tokens are all computed."""
    names = list(report.num_scheduled_tokens)
    tokens = []
    for name in names:
        complete, one = not made.requests[name].is_prefill_chunk, specs[int(name)]
        before, number = sampled.get(name, 0), int(complete)
        if complete:
            number += drafts.accepted(name, report, before)
        sampled[name] = before + number
        given = [next(fresh) for _ in range(number)]
        if before < one["output"] <= sampled[name] and one["output"] < one.get("max_tokens", one["output"]):
            given[one["output"] - before - 1] = STOP
        tokens.append(given)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: k for k, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def line_of(made, world, report, time, preempted):
    admitted = [[int(new.req_id), new.num_computed_tokens] for new in report.scheduled_new_reqs]
    again = report.scheduled_cached_reqs
    for name, computed in zip(again.req_ids, again.num_computed_tokens, strict=True):
        if name in again.resumed_req_ids:
            admitted.append([int(name), computed])
    scheduled = [[int(name), tokens] for name, tokens in report.num_scheduled_tokens.items()]
    free = made.kv_cache_manager.block_pool.get_num_free_blocks()
    line = [time, free, sorted(scheduled), sorted(preempted), sorted(admitted)]
    if "layers" not in world:
        return line
    managers = made.kv_cache_manager.coordinator.single_type_managers
    own = {
        name: [block for one in managers for block in one.req_to_blocks[name]] for name in report.num_scheduled_tokens
    }
    return [*line, sorted([int(name), sum(not one.is_null for one in blocks)] for name, blocks in own.items())]


def pool_lines(made, world):
    if "layers" not in world:
        return []
    groups = made.kv_cache_config.kv_cache_groups
    pool = get_kv_cache_config_from_groups(made.vllm_config, groups, world["memory"])
    return [[max(len(group.layer_names) for group in groups), len(groups), pool.num_blocks]]


def steps(model, world):
    made, depth = scheduler(model, world), 2 if world.get("async_scheduling", False) else 1
    transfers, fresh, drafts = Transfers(made, world["load_s"]), itertools.count(10**6), Drafts(made, world)
    specs, requests, sampled, time, lines, preempted = world["requests"], {}, {}, 0, [], []
    lines += pool_lines(made, world)
    coming = [(one["arrival"], i) for i, one in enumerate(specs) if one["parent"] < 0]
    heapq.heapify(coming)
    flying, running = deque(), set()  # as vLLM's batch queue
    while coming or made.has_requests():
        if not made.has_requests() and not flying:
            time = max(time, coming[0][0])
        while coming and coming[0][0] <= time:
            arrival, i = heapq.heappop(coming)
            requests[i] = request_of(i, world, requests, float(arrival), fresh)
            made.add_request(requests[i])
            running.add(i)
        transfers.end(time)
        report = made.schedule()
        transfers.start(report, time)
        preempted += [int(name) for name in report.preempted_req_ids or ()]
        drafts.decoding.difference_update(report.preempted_req_ids or ())
        if report.num_scheduled_tokens:
            lines.append(line_of(made, world, report, time, preempted))
            preempted = []
            end_s = max(time, flying[-1][0] if flying else 0) + 1
            flying.append((end_s, report, output_of(made, report, specs, sampled, fresh, drafts)))
            if len(flying) < depth:
                continue
        if not flying:
            if not report.preempted_req_ids:  # else vLLM schedules again at once
                time = max(time, transfers.next_end_s(coming))
            continue
        time, report, output = flying.popleft()
        made.update_from_output(report, output)
        drafts.propose(output, sampled)
        finished = sorted(i for i in running if requests[i].is_finished())
        running.difference_update(finished)
        for k, one in enumerate(specs):
            if one["parent"] in finished:
                heapq.heappush(coming, (max(one["arrival"], time + one["delay"]), k))
    return lines


if __name__ == "__main__":
    init_none_hash(sha256)
    worlds = json.loads(Path(sys.argv[2]).read_text())
    print(json.dumps([steps(sys.argv[1], world) for world in worlds]))
