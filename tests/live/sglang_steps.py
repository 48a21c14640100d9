"""SGLang's own scheduler, stepped without a model: python sglang_steps.py SGLANG WORLDS.

SGLANG is the folder that holds SGLang's package. Its scheduling functions are taken from the sources as they are; the
KV pool, the batches and the requests that they work on are plain objects, so that neither a GPU nor SGLang's
requirements are needed. Worlds with a radix cache need torch. Reads a JSON list of worlds and prints a JSON list of
their steps. A step is [kind, [[request, tokens], ...], [retracted request, ...], free tokens, new token ratio]: kind is
"prefill", "mixed", "decode" or "idle". With a radix cache, free tokens include evictable ones, and the empty tokens and
the signature of the tree follow. Steps end with "two prompts in part" where SGLang takes the second one for the only
one, and the first for computed, and with "out of memory" where SGLang stops with that error.
"""

import ast
import collections
import contextlib
import dataclasses
import enum
import itertools
import json
import sys
from array import array
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, Union

import radix_steps

from lengthwise.engine._reference_sglang import shuffle_key


def take(path, names, scope):
    """Execute the functions and classes ``names`` ("name" or "Class.method") of a source file in ``scope``."""
    tree = ast.parse("from __future__ import annotations\n" + path.read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}": one for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    for name in names:
        node = found[name]
        if "." in name:
            node.decorator_list = []
        body = [tree.body[0], node]
        exec(compile(ast.Module(body, []), str(path), "exec"), scope)


class Setting(SimpleNamespace):
    """A setting that is what it was given, and 0 where SGLang asks for one that no world has."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class Variable(NamedTuple):
    """A variable of SGLang's environment, at its default."""

    value: float

    def get(self):
        return self.value


class Pool:
    """Counts the tokens of a KV cache whose prefixes are not shared (``--disable-radix-cache``), and its requests."""

    def __init__(self, scope, world):
        self.scope, self.page_size = scope, world["page_size"]
        self.pages, self.rows = world["pages"], world["max_num_seqs"]

    def available_size(self):
        return self.pages * self.page_size

    def create_prefill_budget(self, tree_cache, *, num_mixed_decode_tokens=0):
        return self.scope["PrefillBudget"](self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def request_slot_reserve(self, **_):
        return 0

    def check_decode_capacity(self, *, num_tokens, **_):
        return self.available_size() >= num_tokens

    def resize(self, req, tokens):
        """Give a request the pages of ``tokens`` tokens; 0 releases it."""
        have, need = (-(-one // self.page_size) for one in (req.kv.kv_committed_len, tokens))
        self.pages -= need - have
        assert self.pages >= 0, "SGLang allocates more than the pool has"
        req.kv.kv_committed_len, req.kv.holds_kv = tokens, tokens > 0


class CachedPool(radix_steps.Pool):
    """The KV pool of a radix cache. ``sources`` adds SGLang's own methods that make room in it."""

    request_slot_reserve, create_prefill_budget = Pool.request_slot_reserve, Pool.create_prefill_budget

    def __init__(self, scope, world):
        longest = max(map(len, world["tokens"]))
        super().__init__(scope["torch"], world | {"max_tokens": longest})
        self.scope, self.rows = scope, world["max_num_seqs"]

    def free(self, req):
        super().free(req)
        self.rows += 1

    def alloc(self, tokens):
        return self._take([(0, tokens, -1)])

    def alloc_extend(self, _prefix, prefix_lens, _seq, seq_lens, last_loc, _tokens):
        return self._take(zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True))

    def alloc_decode(self, _seq, seq_lens, last_loc):
        return self._take((end - 1, end, last) for end, last in zip(seq_lens.tolist(), last_loc.tolist(), strict=True))

    def _take(self, ranges):
        """Return the places of tokens (start, end, place of the token before start), or None without pages."""
        places = []
        for start, end, before in ranges:
            at = before
            for position in range(start, end):
                is_new = position % self.page_size == 0
                if is_new and not self.free_pages:
                    return None
                at = self.free_pages.pop() * self.page_size if is_new else at + 1
                places.append(at)
        return self.torch.tensor(places, dtype=self.torch.int64)

    def extend_all(self, reqs, ends, *, decodes):
        """Give requests the places of their tokens up to ``ends``."""
        torch, tree, rows = self.torch, self.tree, self.req_to_token
        for q in reqs:
            if not q.kv.holds_kv:
                q.kv.req_pool_idx = q.number
                self.rows -= 1
                rows[q.number, : q.prefix_len] = tree.prefix_device_indices(q)
        starts = [q.kv.kv_allocated_len or q.prefix_len for q in reqs]
        last = torch.tensor([int(rows[q.number, at - 1]) if at else -1 for q, at in zip(reqs, starts, strict=True)])
        before, after, count = torch.tensor(starts), torch.tensor(ends), sum(ends) - sum(starts)
        if self.page_size == 1:
            places = self.scope["alloc_token_slots"](tree, count)
        elif decodes:
            places = self.scope["alloc_paged_token_slots_decode"](tree, after, after, last)
        else:
            places = self.scope["alloc_paged_token_slots_extend"](tree, before, before, after, after, last, count)
        at = 0
        for q, start, end in zip(reqs, starts, ends, strict=True):
            rows[q.number, start:end] = places[at : at + end - start]
            at += end - start
            q.kv.kv_allocated_len = q.kv.kv_committed_len = end


class Tree(Setting):
    """A disabled radix cache: nothing is found, nothing can be evicted."""

    disable, buffer_pipeline, linker, storage_prefetch_retries = True, None, None, None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0


class Req(SimpleNamespace):
    """A request, with the attributes that the scheduler reads."""

    def __init__(self, number, prompt, output, cap, ignore_eos):
        super().__init__(
            number=number, rid=number, output=output, prefix_len=0, extend_end=None, is_retracted=False, lora_id=None,
            origin_input_ids=range(prompt), output_ids=[], beam_group=None, priority=None, session=None,
            token_indices_to_pool=None, host_hit_length=0, swa_host_hit_length=0, auxiliary_swa_host_hit_length=0,
            last_node=None, best_match_node=None, lock=None, retracted_stain=False, inflight_middle_chunks=0,
            sampling_params=SimpleNamespace(max_new_tokens=cap, ignore_eos=ignore_eos), cache_request_handle=None,
            storage_hit_length=0, storage_hit_start=0, host_hit_is_storage=False, time_stats=Tree(), to_finish=None,
            kv=SimpleNamespace(kv_committed_len=0, holds_kv=False, holds_mamba=False, req_pool_idx=None),
        )  # fmt: skip

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    extend_len = property(lambda self: self.extend_end - self.prefix_len)

    def init_next_round_input(self, tree_cache=None):
        self.full_untruncated_fill_ids = range(len(self.origin_input_ids) + len(self.output_ids))

    def append_token(self):
        self.output_ids.append(0)

    def finished(self):
        return len(self.output_ids) >= self.output

    def needs_host_load_back(self):
        return False

    def materialized_host_hit_len(self):
        return 0

    def fulfilled_storage_hit_len(self, _prefix_len):
        return 0


class CachedReq(Req):
    """A request with tokens, which a radix cache finds. ``sources`` adds SGLang's own methods."""

    is_dllm = needs_host_load_back = staticmethod(lambda: False)

    def __init__(self, number, prompt, output, cap, ignore_eos, tokens, priority):
        super().__init__(number, prompt, output, cap, ignore_eos)
        self.tokens, self.origin_input_ids, self.output_ids = tokens, array("q", tokens[:prompt]), array("q")
        self.full_untruncated_fill_ids, self.priority, self.retraction_count = array("q"), priority, 0
        self.extra_key = self.cache_salt = self.dllm_config = self.positional_embed_overrides = None
        self.multimodal_inputs = self.input_embeds = self.finished_len = None
        self.skip_radix_cache_insert = self.return_logprob = False
        self.kv = radix_steps.Row(
            req_pool_idx=None, cache_protected_len=0, cache_inserted_len=0, kv_allocated_len=0, kv_committed_len=0,
            holds_mamba=False,
        )  # fmt: skip

    def append_token(self):
        self.output_ids.append(self.tokens[len(self.origin_input_ids) + len(self.output_ids)])

    def owned_kv_len(self):
        return self.kv.kv_committed_len


class Batch:
    """``ScheduleBatch`` without tensors. ``main`` adds the methods that decide about memory and retraction."""

    is_prefill_only = return_logprob = False
    input_embeds, parts = None, 0

    def __init__(self, reqs, *, batch_is_full=False):
        self.reqs, self.batch_is_full, self.chunked_req, self.decoding_reqs = reqs, batch_is_full, None, None
        self.kind, self.forward_mode = "decode", SimpleNamespace(is_extend=lambda: self.kind != "decode")
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)

    @classmethod
    def init_new(cls, reqs, _req_pool, pool, tree_cache, *_, chunked_req=None):
        made = cls(list(reqs))
        made.token_to_kv_pool_allocator, made.tree_cache, made.chunked_req = pool, tree_cache, chunked_req
        return made

    def __call__(self, reqs, batch_is_full):
        made = Batch(reqs, batch_is_full=batch_is_full)
        made.token_to_kv_pool_allocator, made.tree_cache = self.token_to_kv_pool_allocator, self.tree_cache
        return made

    def is_empty(self):
        return not self.reqs

    def batch_size(self):
        return len(self.reqs)

    def filter_batch(self, reqs_to_exclude=(), keep_indices=None):
        if keep_indices is None:
            keep = [i for i, q in enumerate(self.reqs) if not q.finished() and q not in reqs_to_exclude]
        else:
            keep = keep_indices
        self.reqs = [self.reqs[i] for i in keep]

    def merge_batch(self, other):
        self.reqs = self.reqs + other.reqs

    def release_req(self, idx, remaining, **_):
        req, pool = self.reqs[idx], self.token_to_kv_pool_allocator
        if not self.tree_cache.disable:
            return pool.scope["release_req"](
                req=req, remaing_req_count=remaining, req_to_token_pool=pool, token_to_kv_pool_allocator=pool,
                tree_cache=self.tree_cache, hisparse_coordinator=None,
            )  # fmt: skip
        pool.resize(req, 0)
        pool.rows += 1
        req.prefix_len, req.is_retracted, req.retracted_stain, req.inflight_middle_chunks = 0, True, True, 0
        return True

    def prepare_for_extend(self):
        self.kind = "prefill"
        pool = self.token_to_kv_pool_allocator
        self.tokens = [[q.number, q.extend_len] for q in self.reqs]
        self.parts = sum(q.extend_end < len(q.full_untruncated_fill_ids) for q in self.reqs)
        if not self.tree_cache.disable:
            pool.extend_all(self.reqs, [q.extend_end for q in self.reqs], decodes=False)
        for q in self.reqs:
            if self.tree_cache.disable:
                pool.rows -= not q.kv.holds_kv
                pool.resize(q, q.extend_end)
            q.is_retracted = False

    def prepare_for_decode(self):
        self.kind = "decode"
        pool = self.token_to_kv_pool_allocator
        if not self.tree_cache.disable:
            pool.extend_all(self.reqs, [q.kv.kv_committed_len + 1 for q in self.reqs], decodes=True)
        for q in self.reqs:
            if self.tree_cache.disable:
                pool.resize(q, q.kv.kv_committed_len + 1)
        self.tokens = [[q.number, 1] for q in self.reqs]

    def mix_with_running(self, running):
        self.kind = "mixed"
        self.reqs, self.tokens = self.reqs + running.reqs, self.tokens + running.tokens


class Shuffle:
    """Python's ``random``, but with the simulator's random orders: one for each pass over the queue."""

    def __init__(self, seed):
        self.seed, self.number = seed, 0

    def shuffle(self, queue):
        self.number += 1
        queue.sort(key=lambda req: shuffle_key(self.seed, 0, self.number, req.number))


class Adapter:
    """A hook of SGLang that leaves batches as they are."""

    def __getattr__(self, _name):
        return lambda batch, **_: batch


def sources(folder, *, cached):
    """Return a scope with the functions of SGLang's scheduler, and of its radix cache."""
    srt = folder / "sglang" / "srt"
    settings = SimpleNamespace()
    unused = type("Unused", (), {})
    environment = Setting(
        SGLANG_INIT_NEW_TOKEN_RATIO=Variable(0.7),
        SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR=Variable(0.14),
        SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS=Variable(600),
        SGLANG_RETRACT_DECODE_STEPS=Variable(20),
        SGLANG_ENABLE_WAITING_PREFIX_REFRESH=Variable(1),
        SGLANG_RADIX_FORCE_MISS=Variable(0),
    )
    scope = {
        "settings": settings, "envs": environment, "contextmanager": contextlib.contextmanager,
        "nullcontext": contextlib.nullcontext, "dataclass": dataclasses.dataclass, "Enum": enum.Enum, "auto": enum.auto,
        "get_schedule": lambda: settings.schedule, "get_disagg": lambda: Setting(disaggregation_mode="null"),
        "get_parallel": lambda: settings.parallel, "get_exec": lambda: Setting(features=Setting()),
        "is_swa_req_ring": lambda _: False, "_use_exact_chunk_fill": lambda: False, "_IS_HIP": False,
        "mamba_prefill_chunk_grid": lambda: 1,
        "beam_retraction_order": lambda order, _: order, "num_beam_member_rows": lambda _: 0, "TEST_RETRACT": False,
        "ScheduleBatch": Batch, "set_time_batch": lambda *_: None, "set_schedule_time_batch": lambda _: None,
        "PrefillStats": Tree(), "NextBatchPlan": SimpleNamespace, "logger": Tree(), "HTTPStatus": Tree(),
        "FINISH_ABORT": lambda *_, **__: None, "CLIP_MAX_NEW_TOKENS": 4096, "PREFILL_TILE_BUDGET": 0,
        "Req": Req, "split_cached_prefix_by_tier": lambda **_: (0, 0, 0), "sys": sys, "__name__": "sglang_sources",
        "get_memory": lambda: settings.memory, "Counter": collections.Counter, "RadixCache": Tree(),
        "page_interleave_shard_size": lambda _: 1, "array": array, "Union": Union,
    }  # fmt: skip
    if cached:
        add_cache(folder, scope)
    for name in (
        "SWATokenToKVPoolAllocator", "DeepSeekV4HiSparseTokenToKVPoolAllocator", "UnifiedRadixCache",
        "UnifiedMambaTokenToKVPoolAllocator", "UnifiedMambaSWATokenToKVPoolAllocator",
    ):  # fmt: skip
        scope[name] = unused
    sys.modules["sglang_sources"] = SimpleNamespace(**scope)
    take(srt / "mem_cache" / "prefill_budget.py", ["PrefillBudget"], scope)
    names = ["AddReqResult", "_PrefillAdmission", "IGNORE_EOS_RESERVE_TOKENS", "PrefillAdder"]
    names += ["CacheAwarePolicy", "CacheAgnosticPolicy", "SchedulePolicy", "WAITING_PREFIX_REFRESH_INTERVAL"]
    take(srt / "managers" / "schedule_policy.py", names, scope)
    take(srt / "managers" / "scheduler_components" / "new_token_ratio_tracker.py", ["NewTokenRatioTracker"], scope)
    decisions = (
        "new_tokens_required_next_decode",
        "check_decode_mem",
        "retract_decode",
        "_get_decode_retraction_order",
    )
    take(srt / "managers" / "schedule_batch.py", [f"ScheduleBatch.{name}" for name in decisions], scope)
    for name in decisions:
        setattr(Batch, name, staticmethod(scope[name]) if name.startswith("_") else scope[name])
    take(srt / "managers" / "schedule_batch.py", ["Req.next_output_finishes_by_length"], scope)
    Req.next_output_finishes_by_length = scope["next_output_finishes_by_length"]
    if cached:
        own = ("init_next_round_input", "_compute_max_prefix_len", "refresh_fill_ids", "reset_for_retract")
        take(srt / "managers" / "schedule_batch.py", ["release_req", *(f"Req.{name}" for name in own)], scope)
        for name in own:
            setattr(CachedReq, name, scope[name])
        CachedReq.extend_len = Req.extend_len
    steps = (
        "get_next_batch_to_run", "get_num_allocatable_reqs", "get_new_batch_prefill", "_get_new_batch_prefill_raw",
        "update_running_batch", "_reqs_finishing_inflight",
    )  # fmt: skip
    take(srt / "managers" / "scheduler.py", [f"Scheduler.{name}" for name in steps], scope)
    return scope, steps


def add_cache(folder, scope):
    """Add SGLang's radix cache to a scope, and what allocates with it."""
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, radix_steps.Stubs())
    import torch
    from sglang.srt.mem_cache import base_prefix_cache, common, radix_cache

    common.ceil_align = radix_cache.ceil_align = lambda tokens, size: -(-tokens // size) * size
    common.page_interleave_shard_size, common.envs = scope["page_interleave_shard_size"], scope["envs"]
    clock = itertools.count()
    radix_cache.time = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=lambda: 0)
    scope |= {"torch": torch, "available_and_evictable_str": str}
    for module, names in (
        (radix_cache, ("RadixCache", "RadixKey")),
        (base_prefix_cache, ("MatchPrefixParams", "InsertParams", "EvictParams", "zero_match_result")),
        (common, (
            "match_kv_cache", "touch_waiting_prefix", "checkpoint_kv_cache", "release_kv_cache",
            "evict_from_tree_cache",
        )),
    ):  # fmt: skip
        scope |= {name: getattr(module, name) for name in names}
    memory = folder / "sglang" / "srt" / "mem_cache"
    slots = ("alloc_token_slots", "alloc_paged_token_slots_extend", "alloc_paged_token_slots_decode")
    take(memory / "allocation.py", slots, scope)
    room = ("evict_to_free_tokens", "check_decode_capacity", "get_extend_allocation_demand")
    owner = "BaseTokenToKVPoolAllocator"
    take(memory / "allocator" / "base.py", [f"{owner}.{name}" for name in room], scope)
    for name in room:
        setattr(CachedPool, name, scope[name])


def new_tree(scope, pool, world):
    """Return an empty radix cache of SGLang."""
    tree = scope["RadixCache"](
        SimpleNamespace(
            disable=False, req_to_token_pool=pool, token_to_kv_pool_allocator=pool, page_size=world["page_size"],
            is_eagle=False, eviction_policy=world["eviction"], eviction_policy_config=None, enable_metrics=False,
            enable_kv_cache_events=False, dynamo_kv_event_format=False, kv_event_lora_names=None,
        )
    )  # fmt: skip
    tree.metrics_collector, pool.tree = None, tree
    return tree


class Scheduler(Setting):
    """The state that SGLang's functions of ``Scheduler`` work on."""

    dllm_config = chunked_req = prefill_delayer = min_free_slots_delayer = dynamic_chunk_sizer = None
    decode_offload_manager = lora_drainer = truncation_align_size = None

    def __init__(self, scope, steps, world):
        pool = CachedPool(scope, world) if world["cached"] else Pool(scope, world)
        tree = new_tree(scope, pool, world) if world["cached"] else Tree()
        settings, scope["CLIP_MAX_NEW_TOKENS"] = scope["settings"], world["clip"]
        scope["WAITING_QUEUE_PREFIX_MATCH_MAX"], scope["random"] = world["max_matched"], Shuffle(world["shuffle_seed"])
        for name in ("CHECK", "DEPRIORITIZE"):
            scope[f"IN_BATCH_PREFIX_CACHING_{name}_THRESHOLD"] = world["in_batch_tokens"]
        settings.schedule = Setting(
            schedule_conservativeness=world["conservativeness"], retraction_policy="length", prefill_max_requests=None,
            schedule_policy=world["policy"],
        )  # fmt: skip
        settings.memory = SimpleNamespace(radix_eviction_policy=world["eviction"])
        policy = scope["SchedulePolicy"](world["policy"], tree, False, False, False)
        settings.parallel = SimpleNamespace(pp_max_micro_batch_size=world["max_num_seqs"])
        super().__init__(
            page_size=world["page_size"], tree_cache=tree, token_to_kv_pool_allocator=pool, waiting_queue=[],
            req_to_token_pool=SimpleNamespace(available_size=lambda: pool.rows, mamba_allocator=None),
            max_prefill_tokens=world["max_prefill_tokens"], chunked_prefill_size=world["chunked_prefill_size"],
            is_mixed_chunk=world["mixed"], new_token_ratio_tracker=scope["NewTokenRatioTracker"].from_config(),
            max_running_requests=world["max_num_seqs"], policy=policy, running_batch=None,
            grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False), dp_attn_adapter=Adapter(),
            ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, **_: batch),
            tp_worker=SimpleNamespace(model_runner=Setting(attn_backend=object())), load_inquirer=Tree(),
            metrics_reporter=Setting(enable_metrics=False), beam_coordinator=Tree(), model_config=None,
            spec_algorithm=SimpleNamespace(is_none=lambda: True), result_queue=[], enable_overlap=world["overlap"],
            enable_skip_finishing_decode=world["overlap"],
        )  # fmt: skip
        if tree.disable:
            tree.req_to_token_pool, tree.supports_mamba, tree.supports_prefix_sharing = (
                self.req_to_token_pool, lambda: False, lambda: False,
            )  # fmt: skip
        for name in steps:
            setattr(self, name, partial(scope[name], self))
        self.retracted = []

    def get_prefill_adder_class(self):
        return sys.modules["sglang_sources"].PrefillAdder

    def process_pending_chunked_abort(self):
        pass

    _process_hicache_events = process_pending_chunked_abort

    def _should_defer_prefill(self, _running):
        return False

    def _arm_prefill_decode_interval(self, _batch):
        pass

    def stash_chunked_request(self, req):
        if self.tree_cache.disable:
            req.prefix_len = req.extend_end
        else:
            sys.modules["sglang_sources"].checkpoint_kv_cache(req, self.tree_cache)

    def _add_request_to_queue(self, req, is_retracted=False):
        if is_retracted:
            self.retracted.append(req.number)
        self.waiting_queue.append(req)


def end_step(made):
    """Give each request of the oldest pending step its token, and release the requests that have ended."""
    pool, tree, batch = made.token_to_kv_pool_allocator, made.tree_cache, made.result_queue.pop(0)[0]
    for q in batch.reqs:
        if q.finished() or q.is_retracted:
            continue  # Only with overlap: the request has left since the step was formed.
        if q.inflight_middle_chunks > 0:
            q.inflight_middle_chunks -= 1
            continue
        q.append_token()
        if not tree.disable and q.finished():
            pool.scope["release_kv_cache"](q, tree, checkpoint=True)
        elif not tree.disable and q in batch.prompts:
            pool.scope["checkpoint_kv_cache"](q, tree)
        elif q.finished() and tree.disable:
            pool.resize(q, 0)
            pool.rows += 1
    chunked = made.chunked_req
    if not (tree.disable or made.enable_overlap) and chunked is not None and chunked.extend_end > chunked.prefix_len:
        made.stash_chunked_request(chunked)  # SGLang does so when it forms the next step.


def state(made):
    """Return what a line has of the memory after a step."""
    pool, tree = made.token_to_kv_pool_allocator, made.tree_cache
    if tree.disable:
        return pool.available_size(), []
    _, empty, evictable, _, signature = radix_steps.state(tree, 0)
    return empty + evictable, [empty, signature]


def run(scope, steps, world):  # noqa: C901  one loop
    """Return the steps of a world. A request enters at the step of its arrival; a step samples a token of each one."""
    made = Scheduler(scope, steps, world)
    pool = made.token_to_kv_pool_allocator
    blank = Batch.init_new([], None, pool, made.tree_cache)
    blank.kind = "decode"
    empty = {"init_new": Batch.init_new, "__new__": lambda _cls, **fields: blank(**fields)}
    scope["ScheduleBatch"] = type("Made", (), empty)
    requests = [Req(i, *spec) for i, (_, *spec) in enumerate(world["requests"])]
    if world["cached"]:
        more = zip(world["tokens"], world["priority"], strict=True)
        requests = [
            CachedReq(i, *spec[1:], *own) for i, (spec, own) in enumerate(zip(world["requests"], more, strict=True))
        ]
    running, last, lines, sent = blank, None, [], 0

    while True:
        while sent < len(requests) and world["requests"][sent][0] <= len(lines):
            made.waiting_queue.append(requests[sent])
            sent += 1
        made.retracted = []
        try:
            plan = made.get_next_batch_to_run(running, last)
        except RuntimeError as error:
            if "out of memory" in str(error).lower():
                return [*lines, "out of memory"]
            raise
        running, batch = plan.running_batch, plan.batch_to_run
        if batch is not None and batch.parts > 1:
            return [*lines, "two prompts in part"]
        if batch is not None:
            prompts = set(batch.reqs) - set(batch.decoding_reqs or ()) if batch.kind != "decode" else set()
            made.result_queue.append((SimpleNamespace(reqs=list(batch.reqs), prompts=prompts), None))
        if batch is None and (last is None or not world["overlap"]):
            made.new_token_ratio_tracker.reset()
        if (last if world["overlap"] else batch) is not None:
            end_step(made)
        kind, tokens = (batch.kind, batch.tokens) if batch else ("idle", [])
        free_tokens, tree = state(made)
        lines.append([kind, tokens, made.retracted, free_tokens, made.new_token_ratio_tracker.current, *tree])
        last = batch
        if all(q.finished() for q in requests):
            return lines
        assert len(lines) < 20 * sum(q.output + len(q.origin_input_ids) for q in requests) + 100, "SGLang is stuck"


def main():
    worlds = json.loads(Path(sys.argv[2]).read_text())
    scope, steps = sources(Path(sys.argv[1]), cached=any(world["cached"] for world in worlds))
    vars(sys.modules["sglang_sources"]).update(scope)
    print(json.dumps([run(scope, steps, world) for world in worlds]))


if __name__ == "__main__":
    main()
