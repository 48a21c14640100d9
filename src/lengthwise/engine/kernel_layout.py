"""Memory layout of the kernel's state: one record per slot, decode group, replica and step in flight.

A *slot* holds a request from its arrival at a queue to its end; slots are reused, so that the working set grows with
the requests in the system, not with the workload. A *group* is a set of sequences that decode together: a step
updates the group's totals, not each member.
"""

from __future__ import annotations

from typing import Any

import numpy as np

OK, BAD_RANK, BAD_MEMORY, BAD_ROUTE, BLOCKED, BAD_BIN, BAD_PREEMPTION, BAD_DECODE_ROUTE, BAD_DECODE_MEMORY = range(9)
"""Status codes of a run of the kernel."""

SERIES_COLUMNS = ("step_s", "seqs_s", "waiting_s", "kv_blocks_s", "prefill_tokens", "output_tokens")
GAP_SUBBINS = 128
GAP_SMALLEST_EXPONENT = -20
GAP_OCTAVES = 44
GAP_BINS = GAP_SUBBINS * GAP_OCTAVES + 1


def _record(ints: str, floats: str = "") -> np.dtype[Any]:
    """Return an aligned record type of int64 and float64 fields."""
    fields = [(name, "i8") for name in ints.split()] + [(name, "f8") for name in floats.split()]
    return np.dtype(fields, align=True)


slot_t = _record(
    """
    index prompt output priority tenant generated context prefilled blocks admission last_preemption return_number
    join_step finish_step next_block_step counts_block decoding swapped waiting batch generated_at_admission
    cached_blocks freed_before_cached cached_replica prefill_replica decode_replica transfer_blocks
    """,
    "arrival_s last_token_s queued_s queued_for_s charged_tokens",
)
"""A request. ``context`` are the tokens that must be in the cache before the next one: prompt and output so far.
``transfer_blocks`` of ``prefill_replica`` wait there to be fetched by a replica that decodes; ``cached_blocks`` of a
preempted request may still be in the cache of replica ``cached_replica``. ``admission``, ``last_preemption`` and
``return_number`` number all admissions, preemptions and returns from steps of a run; they break ties of victims."""

group_t = _record("steps members kv_tokens cohorts", "last_end_s")

replica_t = _record(
    """
    free_blocks freed_blocks in_flight first_flight idle partials queue check_preemption steps_since_check
    steps_since_admit ended_since_admit phase_steps phase_rounds marked_step side incoming gaps steps tokens
    """,
    """
    sends_until_s receives_until_s busy_until_s deadline_s series_bin_s gap_sum_s gap_max_s pairs kv_read busy_s layer_s
    comm_s prefill_attention_s decode_attention_s host_s head_s first_s send_s swap_s kv_block_s
    """,
)
"""A replica. Its residents hold KV blocks; ``idle`` is the number of the group of those not in flight. ``partials``
counts half-computed prompts, at a decode replica ``incoming`` transfers; ``side`` is 1 for a decode replica;
``deadline_s`` is the first timeout of a resident; ``first_s`` are seconds of embedding."""

flight_t = _record("group rests prompts", "end_s")
"""A step in flight; ``rests`` is 1 where the group accompanies prompts and is not computed."""

queue_t = _record("offset room length", "deadline_s overdue_at_s")
"""A queue in the pool; ``overdue_at_s`` is when the next request will have waited ``max_wait_s``."""

step_t = _record("replica decode_seqs prefill_seqs prefill_tokens kv_blocks waiting", "start_s end_s")
gap_t = _record("count", "gap_s")

result_t = np.dtype(
    [(name, "f8") for name in ("scheduled_s", "first_token_s", "finished_s", "queued_for_s")]
    + [("output_tokens", "i8"), ("replica", "i4"), ("preemptions", "i4"), ("status", "i8"), ("rejection", "i8")],
    align=True,
)

counter_t = _record(
    """
    slots free_slots next released admissions preemptions returns step_rows gap_rows pool_top events problem
    problem_value batches sent_children
    """,
    "last_s bin_deadline_s last_service front_free_s entry_s",
)
"""Global counters. ``next``: the next request without parents; ``sent_children``: size of the heap of those whose last
parent has finished. The front end is free at ``front_free_s``; ``entry_s`` is when the next request has passed it,
infinity while none is on its way."""

param_t = _record(
    """
    replicas decode_replicas pp max_in_flight stride total_blocks block_size watermark_blocks max_num_seqs
    max_step_seqs token_budget max_model_len closed_loop has_dependents central_queue swap prefix_caching
    rank_every_step needs_peak bins series_bins preempts preemption_interval_steps predicted_window tracks_service
    counts_steps parameter_0 parameter_1 parameter_2 parameter_3 parameter_4 parameter_5 has_other_degree idle_tokens
    idle_flags serial_transfers
    """,
    """
    max_wait_s bin_wait_s timeout_s limit_s swap_s_per_block front_serial_s front_request_s transfer_fixed_s
    transfer_token_s
    """,
)
"""Parameters, one row per side: ``replicas`` that prefill, and decode unless there are ``decode_replicas``.
``stride`` is the largest ``max_in_flight`` or ``pp`` of both sides."""

work_t = _record("flight seqs decodes prompts prompt_tokens longest short_of_blocks plan_flags", "swap_s")
"""The step being formed."""
