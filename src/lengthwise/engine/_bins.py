"""Bins in which arrivals of like length gather until they make a batch (Multi-Bin Batching)."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import _layout as layout
from lengthwise.engine._evict import line_up

BAD_BIN = layout.BAD_BIN
INFINITY = float("inf")


@jit
def gather(S, q, now_s, slot, rank, binning):
    """Into the queue, or into a bin that becomes a batch when it is full."""
    if S.par[0].bins == 0:
        line_up(S, q, now_s, slot, rank)
    else:
        _into_bin(S, q, now_s, slot, rank, binning)


@jit_cold
def _into_bin(S, q, now_s, slot, rank, binning):
    request, par = S.slots[slot], S.par[0]
    number = binning(S.predicted[request.index], S.prompt[request.index])
    if number < 0 or number >= par.bins:
        S.ctr[0].problem = BAD_BIN
        S.ctr[0].problem_request = number
        return
    b = q * par.bins + number
    S.bin_slot[b, S.bin_count[b]] = slot
    S.bin_count[b] += 1
    if S.bin_count[b] == 1:
        S.ctr[0].bin_due_s = min(S.ctr[0].bin_due_s, request.arrival_s + par.bin_wait_s)
    if S.bin_count[b] == par.max_num_seqs:
        _complete(S, b, now_s, rank)


@jit_cold
def _complete(S, b, now_s, rank):
    """A bin becomes a batch and joins the queue."""
    q = b // S.par[0].bins
    S.ctr[0].batches += 1
    for i in range(S.bin_count[b]):
        slot = S.bin_slot[b, i]
        S.slots[slot].batch = S.ctr[0].batches
        line_up(S, q, now_s, slot, rank)
    S.bin_count[b] = 0
    if S.par[0].central == 0:
        S.touched[q] = 1
    S.ctr[0].bin_due_s = _next_due(S)


@jit_cold
def _next_due(S):
    """When the first of all bins has waited long enough for its bin to fill."""
    due_s = INFINITY
    for b in range(len(S.bin_count)):
        if S.bin_count[b] > 0:
            due_s = min(due_s, S.slots[S.bin_slot[b, 0]].arrival_s + S.par[0].bin_wait_s)
    return due_s


@jit_cold
def complete_due(S, now_s, rank):
    """Bins whose first has waited long enough become batches as they are."""
    for b in range(len(S.bin_count)):
        if S.bin_count[b] > 0 and S.slots[S.bin_slot[b, 0]].arrival_s + S.par[0].bin_wait_s <= now_s:
            _complete(S, b, now_s, rank)


@jit_cold
def complete_oldest(S, now_s, rank):
    """When nothing else will happen: the bin whose first came first; False: all are empty."""
    oldest, first = -1, 0
    for b in range(len(S.bin_count)):
        if S.bin_count[b] > 0 and (oldest < 0 or S.slots[S.bin_slot[b, 0]].index < first):
            oldest, first = b, S.slots[S.bin_slot[b, 0]].index
    if oldest >= 0:
        _complete(S, oldest, now_s, rank)
    return oldest >= 0
