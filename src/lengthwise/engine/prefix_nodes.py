"""Identity of KV blocks: every full block of every request has the number of a node in one tree of block contents.

Two blocks have the same node if and only if they hold the same tokens after the same tokens: vLLM gives such blocks the
same hash. No tokens are needed, because ``SharedPrefixes`` has which prompts begin alike.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import SharedPrefixes

Ints = npt.NDArray[np.int64]


class PrefixNodes(NamedTuple):
    """Nodes of the full blocks of n requests, prompt and output, as runs of consecutive numbers.

    Request i has the runs ``start[i] : start[i + 1]``. Run k has ``length[k]`` blocks, whose nodes are ``first[k]``,
    ``first[k] + 1``, and so on. ``blocks[i]`` is the number of blocks of request i.
    """

    start: Ints
    first: Ints
    length: Ints
    blocks: Ints

    def of(self, i: int) -> Ints:
        """Return the nodes of request ``i``, one for each full block."""
        runs = range(self.start[i], self.start[i + 1])
        parts = [np.arange(self.first[k], self.first[k] + self.length[k]) for k in runs]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


_KNOWN: dict[int, tuple[Ints, Ints, int, PrefixNodes]] = {}
"""Prompts, outputs, block size and nodes of the last run of each living ``SharedPrefixes``, by its id."""


def nodes_of_run(prompt: Ints, output: Ints, prefixes: SharedPrefixes | None, block_size: int) -> PrefixNodes:
    """Return ``prefix_nodes``. The last result for the same prefixes is reused if lengths and block size are equal."""
    if prefixes is None:
        return prefix_nodes(prompt, output, None, block_size)
    known = _KNOWN.get(id(prefixes))
    if known is not None and known[2] == block_size and np.array_equal(known[:2], (prompt, output)):
        return known[3]
    nodes = prefix_nodes(prompt, output, prefixes, block_size)
    if known is None:
        weakref.finalize(prefixes, _KNOWN.pop, id(prefixes), None)
    _KNOWN[id(prefixes)] = prompt.copy(), output.copy(), block_size, nodes
    return nodes


def prefix_nodes(prompt: Ints, output: Ints, prefixes: SharedPrefixes | None, block_size: int) -> PrefixNodes:
    """Return the nodes of all requests, for blocks of ``block_size`` tokens.

    ``prompt`` and ``output`` are numbers of tokens ([n]). Without ``prefixes``, no two blocks have the same node.
    Raises InputError if neither of ``block_size`` and ``prefixes.block_tokens`` divides the other.
    """
    n, blocks = len(prompt), (prompt + output) // block_size
    if prefixes is None:
        first = np.cumsum(blocks) - blocks
        return PrefixNodes(np.arange(n + 1), first, blocks, blocks)
    large, small = max(prefixes.block_tokens, block_size), min(prefixes.block_tokens, block_size)
    if large % small:
        raise InputError(
            f"the engine's block_size must divide the {prefixes.block_tokens} tokens of a shared block, or be a "
            f"multiple of them; it is {block_size}. Choose another engine.block_size"
        )
    each = max(1, prefixes.block_tokens // block_size)
    shared_start, shared_node, next_node = _shared_nodes(prompt, prefixes, ids_per_node=max(1, block_size // small))
    # A request's runs are its shared blocks, or all runs of its previous turn, and then a run of its own blocks.
    own = blocks - np.diff(shared_start) * each
    turns = prefixes.turns
    later = turns >= 0
    own[later] -= blocks[turns[later]]
    own_first = next_node * each + np.cumsum(own) - own
    depth = _depth(turns)
    count = np.diff(shared_start) + 1
    for d in range(1, int(depth.max()) + 1):
        count[depth == d] = count[turns[depth == d]] + 1
    start = np.concatenate([[0], np.cumsum(count)])
    first, length = np.empty(start[-1], np.int64), np.empty(start[-1], np.int64)
    first[start[1:] - 1], length[start[1:] - 1] = own_first, own
    to = _positions(start[:-1][~later], np.diff(shared_start)[~later])
    first[to], length[to] = shared_node * each, each
    for d in range(1, int(depth.max()) + 1):
        rows = np.flatnonzero(depth == d)
        copied = count[turns[rows]]
        source, to = _positions(start[turns[rows]], copied), _positions(start[rows], copied)
        first[to], length[to] = first[source], length[source]
    return PrefixNodes(start, first, length, blocks)


def _shared_nodes(prompt: Ints, prefixes: SharedPrefixes, ids_per_node: int) -> tuple[Ints, Ints, int]:
    """Number the nodes of shared prefixes. Return (start [n + 1], nodes, how many numbers are used).

    Request i has the nodes ``start[i] : start[i + 1]``. Each distinct prefix of k block ids has a number: that of the
    pair (number of its first k - 1 ids, last id). A node covers ``ids_per_node`` ids, and has the number of the prefix
    that ends with its last id.
    """
    usable = np.minimum(np.diff(prefixes.start), prompt // prefixes.block_tokens) // ids_per_node * ids_per_node
    start = np.concatenate([[0], np.cumsum(usable)])
    # Many requests have equal lists of block ids: number each distinct list once.
    known: dict[bytes, int] = {}
    ends = zip(prefixes.start.tolist(), usable.tolist(), strict=False)
    lists = [known.setdefault(prefixes.block_ids[at : at + k].tobytes(), len(known)) for at, k in ends]
    ids = np.frombuffer(b"".join(known), np.int64)
    _, ids = np.unique(ids, return_inverse=True)
    length = np.array([len(one) // 8 for one in known], np.int64)
    first = np.cumsum(length) - length
    number, state, next_node = np.empty(len(ids), np.int64), np.zeros(len(length), np.int64), 0
    for level in range(int(length.max(initial=0))):
        rows = np.flatnonzero(length > level)
        pairs = state[rows] * (len(ids) + 1) + ids[first[rows] + level]
        distinct, inverse = np.unique(pairs, return_inverse=True)
        state[rows] = number[first[rows] + level] = next_node + inverse
        next_node += len(distinct)
    number = number[_positions(first[lists], usable)]
    is_node = (np.arange(start[-1]) - np.repeat(start[:-1], usable)) % ids_per_node == ids_per_node - 1
    return start // ids_per_node, number[is_node], next_node


def _depth(turns: Ints) -> Ints:
    """Return for each request how many turns came before it."""
    depth, at = np.zeros(len(turns), np.int64), turns
    while (at >= 0).any():
        depth += at >= 0
        at = np.where(at >= 0, turns[at], -1)
    return depth


def _positions(start: Ints, counts: Ints) -> Ints:
    """Return the concatenated ranges ``start[i], ..., start[i] + counts[i] - 1`` of all i."""
    ends = np.cumsum(counts)
    return np.repeat(start - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
