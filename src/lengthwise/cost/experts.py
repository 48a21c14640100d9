"""Computes how unevenly routed tokens load GPUs that hold different experts, and where EPLB puts the experts.

The popularity of a layer's experts is a draw from a Dirichlet distribution with ``CONCENTRATION`` for each expert. A
token draws k experts without replacement; expert e is among them with probability q_e. Of T tokens, a GPU with the
experts G receives rows with mean T sum(q_e) and variance T sum(q_e (1 - q_e)), and its tokens hit
sum(1 - (1 - q_e)^T) of its experts; both numbers are taken as normal. The tables hold the largest number of all GPUs,
averaged over ``LAYERS`` layers. Layers and normal values are drawn once, with a fixed seed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.cost_tables import Floats, Ints

CONCENTRATION = 5.0
"""The whole number that comes closest to ``Curves.routing_power``, fitted to measured deployments: T tokens
hit as many experts as T**0.96 evenly routed ones, within 2.1 % of all experts (8 of 128 or 256 for each token). The
standard deviation of an expert's popularity is 1 / sqrt(5) = 45 % of its mean."""
LAYERS, DRAWS = 32, 4  # layers with a popularity each, and normal values for each GPU of a layer
_TOKENS: Floats = np.unique(np.geomspace(1, 2**24, 97).round())
_SEED = 20_26


def busiest_gpu(
    tokens: Any, *, experts: int, experts_per_token: int, ep: int, redundant: int | None = None
) -> tuple[Any, Any]:
    """Return (rows of the GPU with most tokens, experts that its tokens hit), on average, for ``tokens`` tokens.

    A row is one token at one expert. The experts are divided over ``ep`` GPUs in order or, unless ``redundant`` is
    None, as EPLB divides them with ``redundant`` copies. The loads that EPLB knows are exact.
    """
    rows, hit = _tables(experts, experts_per_token, ep, redundant)
    at = np.log(np.maximum(tokens, 1.0))
    known = np.log(_TOKENS)
    return tokens * np.interp(at, known, rows), np.minimum(tokens, 1.0) * np.interp(at, known, hit)


@lru_cache(maxsize=64)
def _tables(experts: int, experts_per_token: int, ep: int, redundant: int | None) -> tuple[Floats, Floats]:
    """Return [tokens] rows of the busiest GPU for each token, and experts hit on it."""
    rng = np.random.default_rng(_SEED)
    chosen = _probabilities(rng.gamma(CONCENTRATION, size=(LAYERS, experts)), experts_per_token)
    normal = rng.standard_normal((DRAWS, LAYERS, ep))
    if redundant is not None:
        placed = rebalance_experts(chosen, experts + redundant, 1, 1, ep)
        copies = np.stack([np.bincount(row, minlength=experts) for row in placed])
        chosen = np.take_along_axis(chosen / copies, placed, axis=1)
    gpus = chosen.reshape(LAYERS, ep, -1)
    mean, deviation = gpus.sum(axis=2), np.sqrt((gpus * (1 - gpus)).sum(axis=2))
    most = min(experts_per_token, gpus.shape[2])  # rows of one token on one GPU
    rows, hit = np.empty(len(_TOKENS)), np.empty(len(_TOKENS))
    for i, tokens in enumerate(_TOKENS):
        largest = (tokens * mean + np.sqrt(tokens) * deviation * normal).max(axis=2).mean()
        rows[i] = np.clip(largest / tokens, max(mean.mean(), 1 / tokens), most)
        found = -np.expm1(tokens * np.log1p(-np.minimum(gpus, 1 - 1e-12)))
        spread = np.sqrt((found * (1 - found)).sum(axis=2))
        hit[i] = (found.sum(axis=2) + spread * normal).max(axis=2).mean()
        hit[i] = np.clip(hit[i], 1.0, min(rows[i] * tokens, gpus.shape[2]))
    return rows, np.maximum.accumulate(hit)


def _probabilities(popularity: Floats, experts_per_token: int) -> Floats:
    """Return [layers, experts] the probability that a token, which draws without replacement, chooses an expert.

    Each expert's clock rings after an exponential time with its popularity as rate, and the first k to ring are chosen:
    q = 1 - exp(-t popularity), with the time t at which k have rung on average (Newton's method).
    """
    if experts_per_token >= popularity.shape[1]:
        return np.ones(popularity.shape)
    rate = popularity / popularity.sum(axis=1, keepdims=True)
    time = np.full((len(rate), 1), float(experts_per_token))
    for _ in range(30):
        silent = np.exp(-time * rate)
        missing = experts_per_token - (1 - silent).sum(axis=1, keepdims=True)
        time += missing / (rate * silent).sum(axis=1, keepdims=True)
    return np.asarray(1 - np.exp(-time * rate))


def rebalance_experts(load: npt.ArrayLike, slots: int, groups: int, nodes: int, gpus: int) -> Ints:
    """Return [layers, slots] which expert is in each slot, as vLLM's ``DefaultEplbPolicy`` places them (vLLM 0.32).

    The slots of a GPU are consecutive. Groups of experts are packed to nodes, redundant experts are added within each
    node, and the slots are packed to GPUs. If ``nodes`` does not divide ``groups``, all nodes count as one.

    Args:
        load: [layers, experts] tokens by expert.
        slots: Number of experts with redundant ones, a multiple of ``gpus``.
        groups: Number of expert groups, which divides the experts.
        nodes: Number of nodes, which divides ``gpus``.
        gpus: Number of GPUs.
    """
    weight = np.asarray(load, dtype=np.float32)  # vLLM's loads have 32 bits
    if groups % nodes:
        groups = nodes = 1
    layers, experts = weight.shape
    size = experts // groups
    node, rank = _pack(weight.reshape(layers, groups, size).sum(axis=-1), nodes)
    first = (node * (groups // nodes) + rank) * size
    to_node = (first[..., None] + np.arange(size)).reshape(layers, experts)
    from_node = np.argsort(to_node, axis=1)  # experts in the order of nodes
    own = np.take_along_axis(weight, from_node, axis=1).reshape(-1, experts // nodes)
    expert, copies = _replicate(own, slots // nodes)
    gpu, place = _pack(np.take_along_axis(own / copies, expert, axis=1), gpus // nodes)
    order = np.argsort(gpu * (slots // gpus) + place, axis=1)
    placed = np.take_along_axis(expert, order, axis=1).reshape(layers, nodes, -1)
    placed = placed + np.arange(0, experts, experts // nodes)[:, None]
    return np.take_along_axis(from_node, placed.reshape(layers, -1), axis=1)


def _pack(weight: npt.NDArray[np.floating[Any]], packs: int) -> tuple[Ints, Ints]:
    """Return (pack, place in the pack) of each item: the heaviest first, each to the lightest pack with a place."""
    items = weight.shape[1]
    if items == packs:
        return np.tile(np.arange(items), (len(weight), 1)), np.zeros(weight.shape, np.int64)
    pack, place = np.empty(weight.shape, np.int64), np.empty(weight.shape, np.int64)
    for row, order in enumerate(np.argsort(-weight, axis=-1)):
        total, count = np.zeros(packs), np.zeros(packs, np.int64)
        for item in order:
            lightest = int(np.argmin(total))
            pack[row, item], place[row, item] = lightest, count[lightest]
            total[lightest] += weight[row, item]
            count[lightest] += 1
            if count[lightest] == items // packs:
                total[lightest] = np.inf
    return pack, place


def _replicate(weight: npt.NDArray[np.floating[Any]], slots: int) -> tuple[Ints, Ints]:
    """Return (expert of each slot, slots of each expert): a redundant slot goes to the largest load per slot."""
    layers, experts = weight.shape
    expert = np.tile(np.arange(slots), (layers, 1))
    copies, rows = np.ones((layers, experts), np.int64), np.arange(layers)
    for slot in range(experts, slots):
        expert[:, slot] = np.argmax(weight / copies, axis=-1)
        copies[rows, expert[:, slot]] += 1
    return expert, copies
