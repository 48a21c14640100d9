"""SGLang's own radix cache, driven through random operations: run in an interpreter that has torch.

python radix_steps.py SGLANG WORLDS: SGLANG is the folder that holds SGLang's package, of which only ``srt/mem_cache``
is needed. Reads a JSON list of worlds and prints a JSON list of the state after each operation of each world:
[tokens found at admission, empty tokens, evictable tokens, protected tokens, signature of the tree].
"""

import hashlib
import importlib.abc
import importlib.machinery
import itertools
import json
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

REAL = ("radix_cache", "evict_policy", "base_prefix_cache", "cache_init_params", "common", "events", "utils")


def signature(segments, leaves):
    """Return a digest of a tree: its segments (tokens, holders, hits, priority) and its leaves in eviction order."""
    return hashlib.md5(json.dumps([sorted(segments), leaves]).encode()).hexdigest()[:16]


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of SGLang that the radix cache names but does not use here (GPU kernels, metrics, the event format)."""

    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        real = parts[:3] == ["sglang", "srt", "mem_cache"] and parts[3:4] and parts[3] in REAL
        is_folder = name in ("sglang", "sglang.srt", "sglang.srt.mem_cache")
        if parts[0] != "sglang" or real or is_folder:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__name__=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


class Pool:
    """Counts the tokens of a pool, and checks that a page is freed once and only when it is in use."""

    device = "cpu"

    def __init__(self, torch, world):
        self.torch, self.page_size, self.tree = torch, world["page_size"], None
        self.free_pages = list(range(world["pages"]))
        self.req_to_token = torch.full((len(world["requests"]), world["max_tokens"]), -1, dtype=torch.int64)

    def available_size(self):
        return len(self.free_pages) * self.page_size

    def extend(self, req, tokens):
        """Give a request pages up to ``tokens`` tokens, as SGLang does: evict what is short, and then allocate."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        row, size, start = self.req_to_token[req.kv.req_pool_idx], self.page_size, req.kv.kv_allocated_len
        pages = -(-tokens // size) - -(-start // size)
        if pages * size > self.available_size():
            self.tree.evict(EvictParams(num_tokens=pages * size - self.available_size()))
        for position in range(start, tokens):
            base = self.free_pages.pop() * size if position % size == 0 else int(row[position - 1]) // size * size
            row[position] = base + position % size
        req.kv.kv_allocated_len = tokens

    def free_segment(self, indices, start_pos):
        pages = sorted({int(i) // self.page_size for i in indices})
        assert not set(pages) & set(self.free_pages), "a page is freed twice"
        self.free_pages += pages

    def free_segments(self, segments):
        for indices, start_pos in segments:
            self.free_segment(indices, start_pos)

    def write(self, where, indices):
        self.req_to_token[where] = indices

    def free(self, req):
        req.kv.req_pool_idx = None


class Row(SimpleNamespace):
    """What SGLang keeps of a request's KV cache (``ReqKvInfo``)."""

    holds_kv = property(lambda self: self.req_pool_idx is not None)
    is_kv_released = property(lambda self: self.kv_allocated_len == 0)
    swa_evict_floor = 0

    def get_evicted_seqlen(self, _component):
        return 0

    def swa_dead_lo(self, _page_size):
        return 0

    def mark_kv_released(self):
        self.kv_allocated_len = 0


def request(number, spec):
    req = SimpleNamespace(
        rid=number, extra_key=None, cache_salt=None, priority=spec["priority"], skip_radix_cache_insert=False,
        lock=None, last_node=None, is_finished=False, full_untruncated_fill_ids=array("q", spec["tokens"]),
        origin_input_ids=array("q", spec["tokens"][: spec["prompt"]]),
        kv=Row(req_pool_idx=number, cache_protected_len=0, cache_inserted_len=0, kv_allocated_len=0, holds_mamba=False),
    )  # fmt: skip
    req.finished = lambda: req.is_finished
    req.owned_kv_len = lambda: req.kv.kv_allocated_len
    req.refresh_fill_ids = lambda: None
    return req


def state(tree, found):
    """Return the line of ``steps`` for the tree as it is."""
    segments, stack = [], list(tree.root_node.children.values())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        segments.append([list(node.key.token_ids), node.lock_ref, node.hit_count, node.priority])
    order = sorted(tree.evictable_leaves - {tree.root_node}, key=tree.eviction_strategy.get_priority)
    leaves = [list(node.key.token_ids) for node in order]
    empty = tree.token_to_kv_pool_allocator.available_size()
    return [found, empty, tree.evictable_size(), tree.protected_size(), signature(segments, leaves)]


def steps(world):
    import torch
    from sglang.srt.mem_cache import common, radix_cache
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    common.ceil_align = radix_cache.ceil_align = lambda tokens, size: -(-tokens // size) * size
    clock = itertools.count()
    radix_cache.time = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=lambda: 0)
    pool = Pool(torch, world)
    tree = radix_cache.RadixCache(
        SimpleNamespace(
            disable=False,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=pool,
            page_size=world["page_size"],
            is_eagle=False,
            eviction_policy=world["policy"],
            eviction_policy_config=None,
            enable_metrics=False,
            enable_kv_cache_events=False,
            dynamo_kv_event_format=False,
            kv_event_lora_names=None,
        )
    )
    tree.metrics_collector, pool.tree, requests, lines = None, tree, {}, []
    for kind, number, tokens in world["operations"]:
        found = -1
        if kind in ("match", "admit"):
            req = request(number, world["requests"][number])
            # A request preempted before looks up its prompt and the output so far. At least one token is computed.
            key = radix_cache.RadixKey(req.full_untruncated_fill_ids, limit=tokens - 1)
            match = tree.match_prefix(MatchPrefixParams(key=key))
            found = match.device_prefix_len
        if kind == "admit":
            requests[number] = req
            req.lock, req.last_node = tree.lock(match.last_device_node), match.last_device_node
            req.kv.cache_protected_len = req.kv.kv_allocated_len = found
            pool.req_to_token[number, :found] = tree.path_device_indices(match.last_device_node)
        elif kind == "extend":
            pool.extend(requests[number], tokens)
        elif kind == "checkpoint":
            tree.checkpoint(requests[number], up_to=tokens)
        elif kind in ("finish", "preempt"):
            requests[number].is_finished = kind == "finish"
            common.release_kv_cache(requests[number], tree, checkpoint=kind == "finish")
        lines.append(state(tree, found))
    return lines


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    sys.meta_path.insert(0, Stubs())
    worlds = json.loads(Path(sys.argv[2]).read_text())
    print(json.dumps([steps(world) for world in worlds]))
