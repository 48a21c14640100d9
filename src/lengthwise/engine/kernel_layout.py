"""Memory layout of the kernel's state: one record per slot, decode group, replica and step in flight.

A *slot* is the record of a request from its entry into a queue or bin to its end; slots are reused, so that the working
set grows with the requests in the system, not with the workload. A *group* is a set of sequences that decode together:
a step updates the group's totals, not each member.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

OK, BAD_RANK, BAD_MEMORY, BAD_ROUTE, STUCK, BAD_BIN, BAD_PREEMPTION, BAD_DECODE_ROUTE, BAD_DECODE_MEMORY = range(9)
"""Status codes of a run of the kernel."""

ALL = 2**62
"""More than any number of blocks, tokens or uses."""

SERIES_COLUMNS = ("step_s", "seqs_s", "waiting_s", "kv_blocks_s", "prefill_tokens", "output_tokens")
"""Columns of a replica's time series. Those in ``_s`` are integrals over the time in steps."""
GAP_SUBBINS = 128
GAP_SMALLEST_EXPONENT = -20
GAP_OCTAVES = 44
GAP_BINS = GAP_SUBBINS * GAP_OCTAVES + 1


def gap_bin(gap_s: float) -> int:
    """Return the histogram bin of a gap. Each octave has ``GAP_SUBBINS`` equal bins. Bin 0 is below all octaves."""
    mantissa, exponent = math.frexp(gap_s)
    octave = exponent - 1 - GAP_SMALLEST_EXPONENT
    if octave < 0 or mantissa == 0:
        return 0
    return min(1 + octave * GAP_SUBBINS + int((mantissa - 0.5) * 2 * GAP_SUBBINS), GAP_BINS - 1)


def _record(ints: str, floats: str = "") -> np.dtype[Any]:
    fields = [(name, "i8") for name in ints.split()] + [(name, "f8") for name in floats.split()]
    return np.dtype(fields, align=True)


slot_t = _record(
    """
    index prompt output priority tenant generated context prefilled blocks admission last_preemption return_number
    join_step finish_step next_block_step in_block_needs decoding swapped waiting bin_batch generated_at_admission
    cached cached_segment inserted prefill_replica decode_replica transfer_blocks early_blocks place reserved
    extra_steps last_flight skipped next_free_step in_block_frees surplus boundary drafts emits hit next_hit unhashed
    chunk_step chunk_tokens
    """,
    "arrival_s last_token_s resumed_token_s queued_at_s queued_for_s charged_tokens queue_key",
)
"""A request. ``context`` is the prompt plus the output at the last admission, which a prefill must compute; it does not
grow with decodes. The first ``cached`` of its blocks have contents that other requests find; in a radix tree these
blocks end with ``cached_segment`` (-1: there is none), and the request itself has inserted the first ``inserted``.
After its prefill for a decode replica, its blocks are the ``transfer_blocks`` at ``prefill_replica`` (-1: it was
prefilled where it decodes) until the decode replica has fetched them. If its layers are sent while its last prefill
step runs, the decode replica keeps ``early_blocks`` for it, until the end of the step or, if the request ends with that
step, of the transfer. ``admission``, ``last_preemption`` and ``return_number`` are sequence numbers within the run:
of the request's last admission, last preemption, and last return from a step to the idle residents. Return numbers
break ties of victims. If ``in_block_needs`` is 1, the group's ``block_needs`` count the request's next block.
In every local group of layers (``schema.deployment.KvGroups``) the request has freed its first ``skipped`` blocks. At
``next_free_step`` its window leaves a block, and then at every multiple of the block size; the group's ``block_frees``
count it if ``in_block_frees`` is 1. Its next step frees ``surplus`` further blocks. Under asynchronous scheduling each
request counts for itself instead; step ``chunk_step`` of its replica computes ``chunk_tokens`` of its prompt. If full
attention had a longer cached prefix of the request than the windows had, ``boundary`` is the length of that prefix in
blocks, and else 0.
With speculation, its next step verifies ``drafts`` proposed tokens and gives it ``emits`` tokens, and ``hit`` is 1 if
its last step for which tokens were to be proposed accepted any, 0 if none, and -1 before the first; ``next_hit`` is the
value after the next step (``_kernel_speculation``). Its last step accepted ``unhashed`` tokens, which give no block a
content before the next step; -1: a KV transfer ended since, so that no tokens are proposed for its next step.
``queued_at_s`` is the start of the current wait, ``queued_for_s`` the sum of the waits before it, and ``bin_batch`` the
number of the batch that the request's bin became.

Rules of SGLang and TensorRT-LLM: ``place`` is the request's index in ``State.batch_order``, counted through all rows,
or -1. TensorRT-LLM alone: ``reserved`` are the blocks for a resident's complete output, and ``queue_key`` is the key
with which the request first left the queue. Asynchronous scheduling: a request takes ``extra_steps`` steps after its
last token (1 if it ends by EOS), ``last_flight`` is the step in flight that gives it its last token (-1: none yet), and
``resumed_token_s`` is the time of its last token before the recomputation that is in flight."""

group_t = _record("steps members kv_tokens cohorts surplus", "last_end_s")
"""A decode group (``_kernel_groups``). The next step reads ``kv_tokens``; the last one ended at ``last_end_s``.
``surplus`` is the sum of that of its members."""

replica_t = _record(
    """
    free_blocks in_flight first_flight idle_group partials queue
    check_preemption steps_since_check steps_since_admit ended_since_admit phase_steps phase_rounds marked_step side
    incoming gaps steps tokens batch_is_full ordered reserved_blocks last_index ending is_blocked wakes
    passes refreshes spare_blocks preempted_tokens shortages finished prompt_tokens
    drafts decodes draft_tokens accepted_tokens
    joining ahead unmerged has_chunk is_reordered
    fresh newest_decode
    """,
    """
    sends_until_s receives_until_s busy_until_s deadline_s series_bin_s gap_sum_s gap_max_s pairs kv_read busy_s layer_s
    comm_s prefill_attention_s decode_attention_s host_s head_s embedding_s send_s swap_s kv_block_s new_token_ratio
    last_key host_free_s margin by_cost by_budget prompt_s draft_s
    """,
)
"""A replica. Its residents are the requests that have KV blocks on it, without the owners of ``transfer_blocks`` and
those that wait for a load. ``running`` counts the residents and the requests in transfer to it. ``idle_group`` is the
number of the group of decoding residents that are not in flight. ``partials`` is the number of half-computed prompts.
``incoming``, at a decode replica, is the number of transfers to it, whose slots are the last ones in its row of
``State.partials``.
``side`` is its row of the parameters: 1 for a decode replica, 2 and more for further groups of replicas. Neither
residents nor requests that wait for a load have a timeout before ``deadline_s``. ``layer_s`` are seconds of the layers
without attention and collectives, ``embedding_s`` of the token embedding.
With speculation, the drafter proposes ``drafts`` tokens for each sequence of the next step; ``decodes``,
``draft_tokens``, ``accepted_tokens`` and ``draft_s`` are those of ``SpeculationTotals``.
With a prefix cache of states (``Params.aligned``), ``State.fresh`` has ``fresh`` nodes (``GroupPool.fresh``).
Of the requests that have begun to decode, none was admitted after the one of number ``newest_decode``.

Memory reserved by predicted length (``policy.reservation``): the ``margin``, which is the larger one of ``by_cost`` and
``by_budget``, the ``preempted_tokens`` of requests that lack of memory preempted since the last step, the number of
these preemptions (``shortages``) and of requests that have ended since (``finished``), and the ``prompt_tokens`` of all
steps, which took ``prompt_s``.

Rules of SGLang and TensorRT-LLM (``_kernel_sglang``, ``_kernel_trtllm``): ``batch_is_full``, ``new_token_ratio``, the
number of ``ordered`` residents in ``State.batch_order``, the sum of the residents' ``reserved`` blocks, and the queue
key and index of the last resident in order (``last_key``, ``last_index``). SGLang's alone: the number of ``passes``
over the queue, of ``refreshes`` (passes that may refresh the prefixes of waiting requests), and of the free blocks that
keep their contents when ``make_room`` runs next (``spare_blocks``); with overlap (``_kernel_sglang``) how many requests
are ``joining``, whether the step formed last decodes and is in flight (``ahead``), 1 + that step in flight while its
prompts are not in the order of decodes (``unmerged``, else 0), whether a chunk is not in the tree yet (``has_chunk``),
and whether ``return_number`` is the order of the requests in the step in flight (``is_reordered``).

Asynchronous scheduling: ``ending`` requests of ``State.ending`` have their last token in flight, a replica that
``is_blocked`` waits for the end of the oldest step in flight, the host is free at ``host_free_s``, and ``wakes`` is 1
if an event at that time is pending."""

cached_t = np.dtype(
    [("node", "i8")] + [(name, "i4") for name in ("holders", "next", "previous", "next_copy")], align=True
)
"""A block with a content, which ``holders`` requests use. ``next`` and ``previous`` link the unused blocks,
the least recently used first; ``next_copy`` links the blocks with the same content, the oldest first."""

segment_t = np.dtype(
    [(name, "i8") for name in ("used", "created", "priority", "born")]
    + [(name, "i4") for name in ("owner", "start", "length", "parent", "children", "hits", "place")]
    + [(name, "i4") for name in ("weight", "first", "next")],
    align=True,
)
"""A segment of a radix tree, which also has a record of ``State.cached``: ``length`` pages of request ``owner`` from
page ``start`` on. ``parent`` is -1 below the root. ``used`` and ``created`` are times of the pool's ``clock``, and
``place`` is the index in the heap of evictable leaves, or -1. For SGLang's order "dfs-weight", ``born`` sorts the
children of a segment, the oldest first. While it sorts the queue, ``weight`` requests wait at or below the segment, and
``first`` and ``next`` link children in the order in which they are visited (-1: none; ``next`` -2: not linked)."""

pool_t = _record("evictable oldest newest records free_record leaves clock")
"""A row of ``State.cached``. No request uses ``evictable`` blocks; ``oldest`` and ``newest`` are the ends of their
list, -1 if it is empty. The first ``records`` records have been in use; ``free_record`` is the first in the list of
those that are free again. A radix tree has ``leaves`` evictable leaves, and a ``clock`` that counts its uses."""

MAX_READS = 16
"""Maximum number of reads from storage that a request starts. vLLM has no limit, so that two requests can evict each
other's blocks without end."""

CLIP_TOKENS = 4096
"""SGLang's rules: maximum output tokens for which an admission reserves memory (``CLIP_MAX_NEW_TOKENS``)."""

RETRACT_STEPS = 20
"""SGLang's rules: decode steps of every remaining request that the ratio after a retraction covers."""

MAX_MATCHED = 128
"""SGLang's rules: waiting requests beyond which ``lpm`` leaves the queue as it is (``WAITING_QUEUE_PREFIX_MATCH_MAX``).
A refresh renews the prefixes of this many first ones."""

IN_BATCH_TOKENS = 32
"""SGLang's rules: ``lpm`` defers a waiting request that begins with as many tokens as an earlier one, if both have at
most this many cached (``IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD`` and ``..._DEPRIORITIZE_THRESHOLD``)."""

REFRESH_PASSES = 32
"""SGLang's rules: passes over the queue from one refresh of waiting requests' prefixes to the next."""

offload_t = _record("state slot replica load_first load_end stored flagged tokens next_pending_store num_reads wakes")
"""The blocks that a request has stored and loads (``_reference_state.Offload``). ``state`` is that of its load
(``_kernel_tiers``), or 0 without a load. Only its first ``flagged`` blocks may have a flag in ``State.is_used``.
``next_pending_store`` links the requests of a replica whose last blocks are not stored yet, by their number. ``wakes``
is 1 while an event is pending that marks the replica to be scheduled."""

tier_t = _record("loading loaded first_pending_store", "loads_until_s stores_until_s reads_until_s writes_until_s")
"""The CPU memory and storage of a replica. ``loading`` requests are in ``State.loading``; ``loaded`` of them wait for a
step. ``first_pending_store`` is the first request whose last blocks are not stored yet (-1: none). The link to CPU
memory is free from ``loads_until_s`` and ``stores_until_s`` on, the link to storage from ``reads_until_s`` and
``writes_until_s`` on."""

stored_t = np.dtype(
    [(name, "f8") for name in ("ready_s", "busy_until_s")] + [(name, "i4") for name in ("next", "previous", "state")],
    align=True,
)
"""A node in storage: ``state`` 1 if it has a chunk. ``next`` and ``previous`` link the chunks, the least recently used
first."""

storage_t = _record("chunks oldest newest")
"""A row of ``State.stored``: its number of ``chunks``, and the ends of their list, -1 if it is empty."""

flight_t = _record("group paused prompts tokens decodes drafts prompt_tokens outputs", "end_s")
"""A step in flight. ``paused`` is 1 if the decodes of ``group`` pause while the step computes its prompts. Under
asynchronous scheduling, its decodes get ``tokens`` tokens when it ends, and ``State.prompt_chunk`` is 1 for a chunk
that completes its prompt, and 0 for any other.
With data-parallel ranks, the start of the ranks' step needs its ``decodes`` (also set with overlap of SGLang's steps),
``drafts`` (proposed tokens), ``prompt_tokens`` and ``outputs`` (tokens of its decodes, and completed prompts). A dummy
step has neither decodes nor prompts."""

queue_t = _record("offset room length", "deadline_s overdue_at_s")
"""A queue: ``length`` of its ``room`` entries of ``State.queued_*``, which begin at ``offset``. ``deadline_s`` is the
first timeout of a request, ``overdue_at_s`` the earliest time at which a waiting request becomes overdue (has waited
``max_wait_s``). Both may be those of a request that has left."""

step_t = _record("replica decode_seqs prefill_seqs prefill_tokens kv_blocks waiting", "start_s end_s")
gap_t = _record("count", "gap_s")

result_t = np.dtype(
    [(name, "f8") for name in ("scheduled_s", "first_token_s", "finished_s", "queued_for_s", "load_s")]
    + [
        ("output_tokens", "i8"),
        ("cached_tokens", "i8"),
        ("loaded_tokens", "i8"),
        ("storage_tokens", "i8"),
        ("replica", "i4"),
        ("preemptions", "i4"),
        ("status", "i8"),
        ("rejection", "i8"),
    ],
    align=True,
)

counter_t = _record(
    """
    slots free_slots next released admissions preemptions returns step_rows gap_rows queued_top events problem
    problem_value batches sent_children entries
    """,
    "last_s bin_deadline_s last_service front_free_s entry_s transfer_end_s",
)
"""Global counters. ``next`` is the next request without parents. ``sent_children`` is the size of the heap of requests
whose last parent has finished. ``entries`` counts entries into queues under SGLang's rules. ``problem`` is a status
code and ``problem_value`` its number (``setup.error_of``). ``last_s`` is the time of the last event. The front end is
free at ``front_free_s``; at ``entry_s`` the next request leaves it (infinity: no request is in it or known to come). At
``transfer_end_s`` the first of the KV transfers that share links has sent all its bytes."""

path_t = _record("transfers", "served_s target_s rate end_s")
"""The KV transfers that share links, from one replica to another. Each of them has ``rate``, a share of the full
bandwidth, and the first one ends at ``end_s``, when ``served_s`` (seconds at full bandwidth) reaches ``target_s``."""

link_t = _record("transfers", "left")
"""Work record of a replica's link or the switch: what is ``left``, in links, for ``transfers`` of unknown rate."""

fabric_t = _record("active", "now_s")
"""The number of paths with transfers, whose numbers are the first of ``DecodeState.active_paths``, and the time up to
which they are served."""

param_t = _record(
    """
    replicas decode_replicas dp pp max_in_flight stride total_blocks block_size watermark_blocks max_num_seqs
    max_step_seqs token_budget max_model_len closed_loop has_dependents central_queue swap prefix_caching radix_policy
    router_prefix router_sees_memory index_blocks rank_every_step needs_peak bins series_bins preempts_by_policy
    preemption_interval_steps predicted_window tracks_service counts_steps parameter_0 parameter_1 parameter_2
    parameter_3 parameter_4 parameter_5 has_other_degree empty_replica_tokens empty_replica_flags link_sharing
    transfer_layers max_local_prefill_length max_prefill_queue_size recomputes
    offload_blocks tier_row load_if_faster offload_outputs storage_blocks storage_shared sglang chunked_prefill_size
    max_prefill_tokens enable_mixed_chunk trtllm trtllm_chunking longest_prompt async_scheduling hide_host
    vllm_priority reserve clip_tokens schedule_policy refreshes_prefixes shuffle_seed long_prefill_token_threshold
    hybrid attention_groups local_groups local_tokens chunked_local local_cap window_blocks state_groups speculates
    lookahead_tokens drops_block padding_tokens aligned
    """,
    """
    max_wait_s bin_wait_s timeout_s limit_s swap_s_per_block front_serial_s front_request_s transfer_fixed_s
    transfer_timeout_s transfer_token_s links_at_once offload_block_s offload_latency_s storage_read_block_s
    storage_write_block_s storage_latency_s initial_token_ratio least_token_ratio token_ratio_decay
    max_recompute_share preemption_budget
    burstiness missed_draft_rate verify_pair_s draft_layers draft_shared_layers draft_head_share draft_pass_s
    """,
)
"""Parameters, one row for each of ``Setup.rows`` (``setup.Params``): ``replicas`` of this side, ``decode_replicas`` of
the decode side (0: there is none), of which each is a data-parallel rank if ``dp`` is above 1. ``stride`` is the
largest ``max_in_flight`` or ``pp`` of both sides. ``empty_replica_tokens`` and ``empty_replica_flags`` are the batching
policy's plan for one request on an empty replica."""

work_t = _record(
    """
    flight seqs decodes prompts prompt_tokens longest preempted_for_blocks plan_flags found_segment deferred left_input
    left_chunk allocated ends is_served candidate max_chunk drafts draft_pairs accepted found_length
    found_skipped found_boundary left_out left_out_blocks left_out_tokens kv_tokens rank_tokens
    """,
    "swap_s reserved draft_s slowest_s",
)
"""The step that is being formed. ``longest`` are the tokens of its longest prompt. ``found_segment`` is the last
segment of the prefix that the last look-up found in a radix tree. With KV cache groups it found ``found_length`` blocks
without the ``found_skipped`` first ones of local groups, and the request's ``boundary`` (``slot_t``) is
``found_boundary``. ``deferred`` requests are in ``State.deferred``.
``is_served`` is 1 once the residents have been served one by one, in vLLM's order, because blocks were short.
``candidate`` is the slot of the request that the test of memory by predicted length examines. ``max_chunk`` limits the
prompt tokens of one request (vLLM's ``long_prefill_token_threshold``). With speculation (else they are 0), decodes
verify ``drafts`` proposed tokens with ``draft_pairs`` keys and accept ``accepted`` of them; the drafter takes
``draft_s``. The data-parallel ranks of a replica that have formed a step together have ``rank_tokens`` in it, and the
slowest leaves the first stage at ``slowest_s``, before what they compute together.

SGLang's rules: the step may have ``left_input`` more tokens by ``max_prefill_tokens`` and ``left_chunk`` more by
``chunked_prefill_size``; its sequences take ``allocated`` tokens of the GPU pool, ``reserved`` tokens are kept free for
these and for the rest of all outputs, and ``ends`` expected ends are in ``State.tmp_key``. With overlap, the decodes
read ``kv_tokens``, and ``left_out`` sequences, which would need ``left_out_blocks`` and read ``left_out_tokens``, are
not among them."""
