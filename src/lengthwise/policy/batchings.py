"""Batching policies: how many requests a step may admit, how many tokens it may have, and its flags."""

from __future__ import annotations

from lengthwise.policy.contracts import (
    ADMIT_AFTER_PREEMPTION,
    CHUNKED,
    DECODES_WAIT,
    FORM_ONCE,
    ONE_BATCH,
    PADDED,
    RESERVE_BLOCK,
    RESTART_AS_DECODE,
    UNIFORM_SHARES,
    batching,
)

_UNBOUNDED = 1 << 60
_WINDOW_STEPS = 50
_VIDUR = RESERVE_BLOCK + FORM_ONCE


@batching
def static(decodes, prefills, max_num_seqs):
    """Request-level batches: a batch runs until all its requests have finished (FasterTransformer)."""
    admit = max_num_seqs if decodes + prefills == 0 else 0
    return admit, _UNBOUNDED, DECODES_WAIT


@batching
def static_bins(decodes, prefills, max_num_seqs):
    """As static, but only requests of one completed bin run together (Multi-Bin Batching)."""
    admit = max_num_seqs if decodes + prefills == 0 else 0
    return admit, _UNBOUNDED, DECODES_WAIT + ONE_BATCH


@batching
def windowed(num_running, steps_since_admit, ended_since_admit, max_num_seqs):
    """A new batch is formed after 50 steps, or when a request of the batch has finished (ELIS, Algorithm 1)."""
    opened = num_running == 0 or ended_since_admit > 0 or steps_since_admit >= _WINDOW_STEPS
    return max_num_seqs if opened else 0, _UNBOUNDED, 0


@batching
def prefill_first(token_budget, max_num_seqs):
    """A step has complete prompts alone if any can be admitted, otherwise all decodes (vLLM v0)."""
    return max_num_seqs, token_budget, DECODES_WAIT + RESERVE_BLOCK


@batching
def mixed(max_num_seqs):
    """All decodes together with complete prompts, without a token budget (Orca)."""
    return max_num_seqs, _UNBOUNDED, 0


@batching
def chunked(token_budget, max_num_seqs):
    """All decodes, then chunks of prompts in the rest of the token budget (Sarathi-Serve)."""
    return max_num_seqs, token_budget, CHUNKED


@batching
def unified(token_budget, max_num_seqs):
    """One token budget: decodes first, then chunks of prompts (vLLM v1)."""
    return max_num_seqs, token_budget, CHUNKED


@batching
def even(token_budget, max_num_seqs):
    """As ``unified``, but decodes are divided into equal micro-batches, one for each possible step in flight (WAA)."""
    return max_num_seqs, token_budget, CHUNKED + UNIFORM_SHARES


@batching
def vidur_vllm(token_budget, max_num_seqs):
    """As prefill_first, with a token budget that counts a padded batch (Vidur's vLLM)."""
    return max_num_seqs, token_budget, PADDED + DECODES_WAIT + _VIDUR


@batching
def vidur_sarathi(token_budget, max_num_seqs):
    """As chunked, but a decode needs a free block, and a half-computed prompt restarts as decode (Vidur's Sarathi)."""
    return max_num_seqs, token_budget, CHUNKED + _VIDUR + ADMIT_AFTER_PREEMPTION + RESTART_AS_DECODE
