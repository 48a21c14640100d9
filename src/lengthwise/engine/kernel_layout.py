"""How the kernel's state lies in memory: a record a slot, a group, a replica, a step in flight.

A *slot* holds a request from its arrival at a queue to its end; slots are reused, so that the
working set stays as large as what is in the system, not as the workload. A *group* is a set of
sequences that decode together: its members advance by sums, not one by one.
"""

from __future__ import annotations

import numpy as np

OK, BAD_RANK, BAD_MEMORY, BAD_ROUTE, BLOCKED, BAD_BIN, BAD_TAKEOVER, BAD_DECODE_ROUTE, BAD_DECODE_MEMORY = range(9)
"""What a run of the kernel comes back with."""

SERIES_COLUMNS = ("step_s", "seqs_s", "waiting_s", "kv_blocks_s", "prefill_tokens", "output_tokens")
GAP_SUBBINS = 128
GAP_SMALLEST_EXPONENT = -20
GAP_OCTAVES = 44
GAP_BINS = GAP_SUBBINS * GAP_OCTAVES + 1

slot_t = np.dtype(
    [
        ("index", "i8"),
        ("arrival_s", "f8"),
        ("prompt", "i8"),
        ("output", "i8"),
        ("priority", "i8"),
        ("tenant", "i8"),
        ("generated", "i8"),
        ("context", "i8"),
        ("prefilled", "i8"),
        ("blocks", "i8"),
        ("admission", "i8"),
        ("eviction", "i8"),
        ("slot_index", "i8"),
        ("last_token_s", "f8"),
        ("join_step", "i8"),
        ("due", "i8"),
        ("grow_at", "i8"),
        ("growing", "i8"),
        ("decoding", "i8"),
        ("swapped", "i8"),
        ("waiting", "i8"),
        ("batch", "i8"),
        ("entered", "i8"),
        ("retained", "i8"),
        ("kept_mark", "i8"),
        ("kept_on", "i8"),
        ("home", "i8"),
        ("remote", "i8"),
        ("reserved", "i8"),
        ("queued_s", "f8"),
        ("queued_for_s", "f8"),
        ("charged", "f8"),
    ],
    align=True,
)
"""``context`` is what must be in the cache before the next token: prompt and tokens so far. ``held`` blocks of replica
``home`` wait there to be fetched by one that decodes."""

group_t = np.dtype(
    [("steps", "i8"), ("members", "i8"), ("kv_tokens", "i8"), ("cohorts", "i8"), ("last_end_s", "f8")], align=True
)

replica_t = np.dtype(
    [
        ("free_blocks", "i8"),
        ("total_released", "i8"),
        ("in_flight", "i8"),
        ("first_flight", "i8"),
        ("idle", "i8"),
        ("partials", "i8"),
        ("queue", "i8"),
        ("decide", "i8"),
        ("undecided", "i8"),
        ("steps_since", "i8"),
        ("ended_since", "i8"),
        ("phase_steps", "i8"),
        ("phase_rounds", "i8"),
        ("phase_mark", "i8"),
        ("side", "i8"),
        ("incoming", "i8"),
        ("sends_until_s", "f8"),
        ("receives_until_s", "f8"),
        ("busy_until_s", "f8"),
        ("deadline_s", "f8"),
        ("bin_s", "f8"),
        ("gap_sum_s", "f8"),
        ("gap_max_s", "f8"),
        ("gaps", "i8"),
        ("steps", "i8"),
        ("tokens", "i8"),
        ("pairs", "f8"),
        ("kv_read", "f8"),
        ("busy_s", "f8"),
        ("layer_s", "f8"),
        ("comm_s", "f8"),
        ("prefill_attention_s", "f8"),
        ("decode_attention_s", "f8"),
        ("host_s", "f8"),
        ("head_s", "f8"),
        ("first_s", "f8"),
        ("send_s", "f8"),
        ("swap_s", "f8"),
        ("kv_block_s", "f8"),
    ],
    align=True,
)

flight_t = np.dtype([("end_s", "f8"), ("group", "i8"), ("rests", "i8"), ("prompts", "i8")], align=True)
"""``rests``: 1 where the group goes along with prompts and is not computed."""

queue_t = np.dtype(
    [("offset", "i8"), ("room", "i8"), ("length", "i8"), ("deadline_s", "f8"), ("overdue_s", "f8")], align=True
)

step_t = np.dtype(
    [
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("replica", "i8"),
        ("decode_seqs", "i8"),
        ("prefill_seqs", "i8"),
        ("prefill_tokens", "i8"),
        ("kv_blocks", "i8"),
        ("waiting", "i8"),
    ],
    align=True,
)

gap_t = np.dtype([("gap_s", "f8"), ("count", "i8")], align=True)

result_t = np.dtype(
    [
        ("scheduled_s", "f8"),
        ("first_token_s", "f8"),
        ("finished_s", "f8"),
        ("queued_for_s", "f8"),
        ("output_tokens", "i8"),
        ("replica", "i4"),
        ("preemptions", "i4"),
        ("status", "i8"),
        ("rejection", "i8"),
    ],
    align=True,
)

counter_t = np.dtype(
    [
        ("slots", "i8"),
        ("free_slots", "i8"),
        ("next", "i8"),
        ("released", "i8"),
        ("admissions", "i8"),
        ("evictions", "i8"),
        ("slot_indices", "i8"),
        ("step_rows", "i8"),
        ("gap_rows", "i8"),
        ("pool_top", "i8"),
        ("events", "i8"),
        ("problem", "i8"),
        ("problem_request", "i8"),
        ("batches", "i8"),
        ("sent", "i8"),
        ("last_s", "f8"),
        ("bin_due_s", "f8"),
        ("last_service", "f8"),
        ("front_free_s", "f8"),
        ("entry_s", "f8"),
    ],
    align=True,
)
"""What there is one of: slots ever used, free ones, the next arrival, sequence numbers, log rows.

``next`` is the next one that waits for nobody, ``sent`` are those in the heap whose last parent has finished. The front
is free at ``front_free_s``, all that entered behind it; ``entry_s`` is when the next request has passed it and enters;
infinity while none is on its way."""

param_t = np.dtype(
    [
        ("replicas", "i8"),
        ("decodes", "i8"),
        ("pp", "i8"),
        ("flights", "i8"),
        ("stride", "i8"),
        ("total_blocks", "i8"),
        ("block_size", "i8"),
        ("watermark_blocks", "i8"),
        ("max_num_seqs", "i8"),
        ("max_step_seqs", "i8"),
        ("token_budget", "i8"),
        ("max_model_len", "i8"),
        ("closed", "i8"),
        ("follows", "i8"),
        ("central", "i8"),
        ("swap", "i8"),
        ("finds_again", "i8"),
        ("rekey", "i8"),
        ("needs_peak", "i8"),
        ("bins", "i8"),
        ("series_bins", "i8"),
        ("takes_over", "i8"),
        ("window", "i8"),
        ("predicted_window", "i8"),
        ("charges", "i8"),
        ("counts_steps", "i8"),
        ("parameter_0", "i8"),
        ("parameter_1", "i8"),
        ("parameter_2", "i8"),
        ("parameter_3", "i8"),
        ("parameter_4", "i8"),
        ("parameter_5", "i8"),
        ("two_degrees", "i8"),
        ("max_wait_s", "f8"),
        ("bin_wait_s", "f8"),
        ("empty_tokens", "i8"),
        ("empty_flags", "i8"),
        ("timeout_s", "f8"),
        ("limit_s", "f8"),
        ("swap_s_per_block", "f8"),
        ("front_queue_s", "f8"),
        ("front_request_s", "f8"),
        ("handover_fixed_s", "f8"),
        ("handover_token_s", "f8"),
        ("one_at_a_time", "i8"),
    ],
    align=True,
)
"""A row a side: ``replicas`` that prefill, and decode where nobody else does, and ``decodes`` that only decode.

``flights`` steps may be in a replica's pipeline at a time; ``stride`` is the larger of both sides'.
"""

work_t = np.dtype(
    [
        ("flight", "i8"),
        ("seqs", "i8"),
        ("decodes", "i8"),
        ("prompts", "i8"),
        ("prompt_tokens", "i8"),
        ("longest", "i8"),
        ("evicted", "i8"),
        ("plan_flags", "i8"),
        ("swap_s", "f8"),
    ],
    align=True,
)
"""The step being formed."""
