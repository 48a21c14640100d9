"""What can be said without an engine: Multi-Bin Batching's formulas, and queues by what is known of lengths."""

from lengthwise.theory.batch_server import Served, serve
from lengthwise.theory.boundaries import (
    equal_mass,
    exponential_recursion,
    exponential_steps,
    learned,
    uniform_optimal,
)
from lengthwise.theory.confusion import confuse, neighbours, of_accuracy, of_predictions
from lengthwise.theory.multibin import (
    bins_for,
    capacity_rps,
    expected_batch_s,
    exponential_bound_s,
    exponential_least_bound_s,
    gain,
    latency_s,
    throughput_rps,
    uniform_batch_s,
    uniform_bins_for,
    uniform_throughput_rps,
)
from lengthwise.theory.multibin_study import (
    RULES,
    Bins,
    MultiBinStudy,
    cuts_of,
    multibin_study,
    token_boundaries,
)
from lengthwise.theory.queue_study import ORDERS, QueueStudy, queue_study
from lengthwise.theory.queues import (
    Sojourn,
    erlang_c,
    fcfs,
    processor_sharing,
    share_kept,
    sjf,
    spjf,
    sprpt,
    srpt,
    with_error,
)
from lengthwise.theory.sampled import SampledTimes
from lengthwise.theory.service import ExponentialTimes, ServiceTimes, UniformTimes, bin_of
from lengthwise.theory.simulated import estimate, runs

__all__ = [
    "ORDERS",
    "RULES",
    "Bins",
    "ExponentialTimes",
    "MultiBinStudy",
    "QueueStudy",
    "SampledTimes",
    "Served",
    "ServiceTimes",
    "Sojourn",
    "UniformTimes",
    "bin_of",
    "bins_for",
    "capacity_rps",
    "confuse",
    "cuts_of",
    "equal_mass",
    "erlang_c",
    "estimate",
    "expected_batch_s",
    "exponential_bound_s",
    "exponential_least_bound_s",
    "exponential_recursion",
    "exponential_steps",
    "fcfs",
    "gain",
    "latency_s",
    "learned",
    "multibin_study",
    "neighbours",
    "of_accuracy",
    "of_predictions",
    "processor_sharing",
    "queue_study",
    "runs",
    "serve",
    "share_kept",
    "sjf",
    "spjf",
    "sprpt",
    "srpt",
    "throughput_rps",
    "token_boundaries",
    "uniform_batch_s",
    "uniform_bins_for",
    "uniform_optimal",
    "uniform_throughput_rps",
    "with_error",
]
