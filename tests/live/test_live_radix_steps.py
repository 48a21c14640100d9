"""The simulator's radix tree is SGLang's: equal state after every operation of random requests in a small pool."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from plugin_engines import ROOT
from radix_steps import signature

from lengthwise.engine._reference_state import RADIX_ORDERS, RadixCache
from lengthwise.schema.deployment import RADIX_EVICTION_POLICIES

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORLDS = int(os.environ.get("LENGTHWISE_RADIX_WORLDS", "70"))
OPERATIONS = 150
SGLANG = ROOT / ".engines" / "sglang-mem-cache"
"""The part of SGLang's package that ``make engine`` unpacks."""


class Driver:
    """Drives ``RadixCache`` through random operations of requests with prefixes in common, as an engine would."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.size = int(self.rng.choice([1, 4]))
        self.max_tokens = 60 if self.size == 4 else 25
        self.pages = -(-self.max_tokens // self.size) + int(self.rng.integers(0, 40))
        self.policy = RADIX_EVICTION_POLICIES[seed % len(RADIX_EVICTION_POLICIES)]
        self.tree = RadixCache(self.pages, self.policy)
        self.requests, self.running, self.waiting = [], [], []
        self.ids, self.tokens_of, self.operations, self.lines = {}, {}, [], []

    def nodes(self, tokens):
        """The nodes of the full pages of tokens: a number for each distinct chain."""
        found = []
        for end in range(self.size, len(tokens) + 1, self.size):
            node = self.ids.setdefault(tuple(tokens[:end]), len(self.ids))
            self.tokens_of[node] = tokens[end - self.size : end]
            found.append(node)
        return found

    def new_request(self):
        rng, total = self.rng, int(self.rng.integers(2, self.max_tokens + 1))
        tokens = []
        if self.requests and rng.random() < 0.7:  # It begins as another one does, at times after its output.
            other = self.requests[int(rng.integers(len(self.requests)))]["tokens"]
            tokens = other[: int(rng.integers(0, len(other) + 1))]
        tokens = (tokens + [int(k) for k in rng.integers(0, 3, total)])[:total]
        one = {"tokens": tokens, "prompt": int(rng.integers(1, total)), "priority": int(rng.integers(0, 3))}
        self.requests.append(one)
        self.waiting.append({"number": len(self.requests) - 1, "context": one["prompt"], **one})

    def state(self, found):
        tree, size = self.tree, self.size
        tokens = {id(n): [t for page in n.pages for t in self.tokens_of[page]] for n in tree.segments()}
        segments = [[tokens[id(n)], n.holders, n.hits, n.priority] for n in tree.segments() if n.parent]
        leaves = [n for n in tree.segments() if n.parent and not n.children and not n.holders]
        order = [tokens[id(n)] for n in sorted(leaves, key=RADIX_ORDERS[self.policy])]
        protected = sum(len(n.pages) for n in tree.segments() if n.holders)
        empty = (tree.free - tree.evictable) * size
        return [found, empty, tree.evictable * size, protected * size, signature(segments, order)]

    def record(self, kind, number, tokens, found=-1):
        self.operations.append([kind, number, tokens])
        self.lines.append(self.state(found))

    def admit(self, q):
        """Look a request up, and admit it with its first chunk if that fits."""
        found = self.tree.find(self.nodes(q["tokens"][: q["context"] - 1]))
        tokens = self.chunk_end(q, len(found) * self.size)
        fits = -(-tokens // self.size) - self.tree.in_use(found) <= self.tree.free
        if fits:
            self.tree.hold(found)
        self.record("admit" if fits else "match", q["number"], q["context"], len(found) * self.size)
        if fits:
            q |= {"cached": found, "blocks": len(found), "computed": len(found) * self.size}
            self.waiting.remove(q)
            self.running.append(q)
            self.extend(q, tokens)

    def chunk_end(self, q, computed):
        """Where a chunk of the prompt, or the next token, ends."""
        return computed + int(self.rng.integers(1, q["context"] - computed + 1))

    def extend(self, q, tokens):
        """Compute up to ``tokens``. Preempt a request instead where pages are short."""
        need = -(-tokens // self.size) - q["blocks"]
        if need > self.tree.free:
            self.end(self.running[int(self.rng.integers(len(self.running)))], "preempt")
            return
        self.tree.take(need)
        q["blocks"] += need
        was_prompt = q["computed"] < q.get("prefill", q["context"])
        q["computed"] = tokens
        self.record("extend", q["number"], tokens)
        if was_prompt:
            self.cache(q)
            self.record("checkpoint", q["number"], tokens)
        if tokens == q["context"]:
            q["prefill"] = 0  # What follows are decoded tokens, which enter the tree at the end.
            if q["context"] == len(q["tokens"]):
                self.end(q, "finish")
            else:
                q["context"] += 1

    def cache(self, q):
        nodes = self.nodes(q["tokens"][: q["computed"]])
        if nodes:
            q["cached"] = self.tree.cache(q["cached"], nodes, q["prompt"] // self.size, q["priority"])

    def end(self, q, kind):
        if kind == "finish":
            self.cache(q)
        self.tree.release(q["cached"], q["blocks"] - len(q["cached"]))
        self.running.remove(q)
        self.record(kind, q["number"], 0)
        if kind == "preempt":
            q.pop("prefill", None)
            self.waiting.append(q)

    def run(self):
        while len(self.operations) < OPERATIONS:
            draw = self.rng.random()
            if draw < 0.2 or not (self.running or self.waiting):
                self.new_request()
            elif self.waiting and (draw < 0.4 or not self.running):
                self.admit(self.waiting[int(self.rng.integers(len(self.waiting)))])
            elif self.running:
                q = self.running[int(self.rng.integers(len(self.running)))]
                if draw > 0.97:
                    self.end(q, "preempt")
                else:
                    self.extend(q, self.chunk_end(q, q["computed"]))
        return {
            "page_size": self.size, "pages": self.pages, "max_tokens": self.max_tokens, "policy": self.policy,
            "requests": self.requests, "operations": self.operations,
        }  # fmt: skip


def sglang_steps(worlds, python):
    """The states of SGLang's own tree in each world."""
    assert SGLANG.exists(), f"no {SGLANG}: make engine"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worlds.json"
        path.write_text(json.dumps(worlds))
        words = [python, str(Path(__file__).parent / "radix_steps.py"), str(SGLANG), str(path)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=3000, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return json.loads(ran.stdout.splitlines()[-1])


def compared_at_least(steps, python):
    """Compare states of as many worlds as have so many. Return their counts, the states as "value"."""
    counts, worlds, chunk = Counter(), 0, 200
    while counts["steps"] < steps:
        counts += Counter(compared(range(worlds, worlds + chunk), python))
        worlds += chunk
    return {"value": counts.pop("steps"), "worlds": worlds, **counts}


def compared(seeds, python):
    """Compare all states of random worlds. Return how many there are, hits, evictions and preemptions among them."""
    drivers = [Driver(seed) for seed in seeds]
    expected = sglang_steps([driver.run() for driver in drivers], python)
    counts = dict.fromkeys(("steps", "hits", "evictions", "preemptions"), 0)
    for driver, lines in zip(drivers, expected, strict=True):
        for number, (found, of_sglang) in enumerate(zip(driver.lines, lines, strict=True)):
            assert found == of_sglang, (driver.policy, driver.size, number, driver.operations[number], found, of_sglang)
        counts["steps"] += len(lines)
        counts["hits"] += sum(line[0] > 0 for line in lines)
        counts["preemptions"] += sum(kind == "preempt" for kind, _, _ in driver.operations)
        changes = zip(driver.operations[1:], lines[1:], lines, strict=False)
        counts["evictions"] += sum(kind == "extend" and line[2] < last[2] for (kind, _, _), line, last in changes)
    return counts


def test_every_state_is_that_of_sglang(engine_python):
    counts = compared(range(WORLDS), engine_python)
    assert counts["steps"] >= OPERATIONS * WORLDS
    assert min(counts.values()) > WORLDS, counts
