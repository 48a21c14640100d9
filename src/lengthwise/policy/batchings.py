"""How a step is formed: how many to admit, how many prompt tokens, under which flags."""

from __future__ import annotations

from lengthwise.policy.contracts import (
    ADMIT_AFTER_EVICTION,
    CHUNKED,
    DECODES_WAIT,
    PADDED,
    SPARE_BLOCK,
    batching,
)

_UNLIMITED = 1 << 60


@batching
def static(decodes, prefills, max_num_seqs):
    """Request-level batches: a batch runs until all of it has finished (FasterTransformer)."""
    admit = max_num_seqs if decodes + prefills == 0 else 0
    return admit, _UNLIMITED, DECODES_WAIT


@batching
def prefill_first(token_budget, max_num_seqs):
    """Whole prompts alone as soon as any can be admitted, else all decodes (vLLM v0)."""
    return max_num_seqs, token_budget, DECODES_WAIT + SPARE_BLOCK


@batching
def mixed(max_num_seqs):
    """All decodes together with whole prompts, without a token budget (Orca)."""
    return max_num_seqs, _UNLIMITED, 0


@batching
def chunked(decodes, token_budget, max_num_seqs):
    """All decodes, then prompts cut to what is left of the chunk (Sarathi-Serve)."""
    return max_num_seqs, max(token_budget - decodes, 0), CHUNKED


@batching
def unified(decodes, token_budget, max_num_seqs):
    """One token budget: decodes first, prompts cut to what is left (vLLM v1)."""
    return max_num_seqs, max(token_budget - decodes, 0), CHUNKED


@batching
def vidur_vllm(token_budget, max_num_seqs):
    """Vidur's vLLM: as prefill_first, the budget counting a padded batch."""
    return max_num_seqs, token_budget, PADDED + DECODES_WAIT + SPARE_BLOCK


@batching
def vidur_sarathi(decodes, token_budget, max_num_seqs):
    """Vidur's Sarathi: as chunked, with a spare block a decode and admission after evictions."""
    return max_num_seqs, max(token_budget - decodes, 0), CHUNKED + SPARE_BLOCK + ADMIT_AFTER_EVICTION
