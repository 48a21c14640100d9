from .compile import COLUMNS, compiled, interpreted, key_of, keys
from .contracts import (
    ADMIT_AFTER_EVICTION,
    CHUNKED,
    DECODES_REST,
    DECODES_WAIT,
    FORM_ONCE,
    NEW_PHASE,
    ONE_BATCH,
    ONE_BY_ONE,
    PADDED,
    PREDICTED,
    RESERVE_BLOCK,
    RESTART_AS_DECODE,
    SERVICE_OUTPUT_WEIGHT,
    UNIFORM_SHARES,
    Policy,
    batching,
    binning,
    memory,
    rank,
    router,
    takeover,
)
from .families import aged, aged_gittins, bins, call_of, encode, mlfq, rra, worth
from .named_schedulers import PREEMPTIONS, catalog, known, named, resolve, scheduler

__all__ = ["ADMIT_AFTER_EVICTION", "CHUNKED", "COLUMNS", "DECODES_REST", "DECODES_WAIT", "FORM_ONCE", "NEW_PHASE", "ONE_BATCH", "ONE_BY_ONE", "PADDED", "PREDICTED", "PREEMPTIONS", "RESERVE_BLOCK", "RESTART_AS_DECODE", "SERVICE_OUTPUT_WEIGHT", "UNIFORM_SHARES", "Policy", "aged", "aged_gittins", "batching", "binning", "bins", "call_of", "catalog", "compiled", "encode", "interpreted", "key_of", "keys", "known", "memory", "mlfq", "named", "rank", "resolve", "router", "rra", "scheduler", "takeover", "worth"]
