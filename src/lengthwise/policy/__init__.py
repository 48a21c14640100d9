"""Who goes first, who leaves, how a step is formed, which replica: small compiled functions."""

from lengthwise.policy.compile import compiled, interpreted
from lengthwise.policy.contracts import (
    ADMIT_AFTER_EVICTION,
    CHUNKED,
    DECODES_WAIT,
    FORM_ONCE,
    PADDED,
    RESTART_AS_DECODE,
    SPARE_BLOCK,
    Policy,
    batching,
    memory,
    rank,
    router,
)
from lengthwise.policy.named import PREEMPTIONS, catalog, known, named, resolve, scheduler

__all__ = [
    "ADMIT_AFTER_EVICTION",
    "CHUNKED",
    "DECODES_WAIT",
    "FORM_ONCE",
    "PADDED",
    "PREEMPTIONS",
    "RESTART_AS_DECODE",
    "SPARE_BLOCK",
    "Policy",
    "batching",
    "catalog",
    "compiled",
    "interpreted",
    "known",
    "memory",
    "named",
    "rank",
    "resolve",
    "router",
    "scheduler",
]
