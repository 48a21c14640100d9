"""The time series of replicas whose runs are of very different lengths."""

from __future__ import annotations

import numpy as np
import pytest

from lengthwise import deploy
from lengthwise.engine import simulate
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.workload import Workload


@pytest.mark.parametrize("late_s", [1.0, 1e4, 1e6])
def test_a_replica_that_was_done_long_ago_is_counted_in_the_first_bin(late_s):
    limits = EngineLimits(max_num_batched_tokens=256, max_model_len=512)
    one = deploy("llama-3-8b", "H100", replicas=2, limits=limits)
    records = simulate(Workload([0.0, 0.0, late_s], [10, 20, 40], [3, 5, 7]), one)
    assert records.series.output_tokens.sum() == 3 + 5 + 7
    assert records.series.prefill_tokens.sum() == 10 + 20 + 40
    assert np.flatnonzero(records.series.output_tokens)[0] == 0
