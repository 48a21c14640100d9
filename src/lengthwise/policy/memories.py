"""Memory policies: how many KV blocks a request gets when it is admitted, or -1 to wait."""

from __future__ import annotations

from lengthwise.policy.contracts import memory


@memory
def reserve_max(max_model_len, block_size, free_blocks):
    """Blocks for the longest sequence that the engine accepts (FasterTransformer, Orca)."""
    need = (max_model_len + block_size - 1) // block_size
    return need if need <= free_blocks else -1


@memory
def vidur_reserve_max(max_model_len, block_size, free_blocks):
    """As reserve_max, rounded down to complete blocks (Vidur)."""
    need = max(1, max_model_len // block_size)
    return need if need <= free_blocks else -1


@memory
def paged(context_tokens, block_size, free_blocks, watermark_blocks, num_running):
    """Blocks for the complete prompt, which must fit above the watermark. More come on demand (vLLM v0, Sarathi)."""
    need = (context_tokens + block_size - 1) // block_size
    left = free_blocks - need
    if left < 0 or (num_running > 0 and left < watermark_blocks):
        return -1
    return need


@memory
def paged_by_chunk(context_tokens, chunk_tokens, block_size, free_blocks, watermark_blocks, num_running):
    """Blocks for a chunk, if those of the complete prompt are free (vLLM v1's scheduler_reserve_full_isl)."""
    left = free_blocks - (context_tokens + block_size - 1) // block_size
    if left < 0 or (num_running > 0 and left < watermark_blocks):
        return -1
    return (chunk_tokens + block_size - 1) // block_size


@memory
def paged_strict(context_tokens, block_size, free_blocks, watermark_blocks):
    """As paged, with the watermark even on an empty replica (Vidur)."""
    need = (context_tokens + block_size - 1) // block_size
    return need if free_blocks - need >= watermark_blocks else -1


@memory
def predicted_peak(context_tokens, block_size, free_blocks, total_blocks, num_running, peak_tokens):
    """Blocks for the prompt, if the predicted peak of KV tokens of this and all running requests fits in the cache.

    More blocks come on demand (LightLLM, Past-Future).
    """
    need = (context_tokens + block_size - 1) // block_size
    if need > free_blocks or (num_running > 0 and peak_tokens > total_blocks * block_size):
        return -1
    return need
