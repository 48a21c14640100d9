"""Weights of tenants divide the service while they wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_worlds import request, scheduler, sent, worker


@given(st.floats(0.25, 8.0), st.integers(1, 60), st.booleans())
def test_waiting_tenants_get_service_in_proportion_to_their_weights(weight, tokens, late):
    """Of equal requests, at any moment, to within one request of each; whichever tenant comes later."""
    made = scheduler("fcfs", fairness="vtc", workers=[worker()], max_wait_s=1e9)
    made.service.weights = {1: weight}
    for number in range(80):
        tenant = 1 + (number >= 40) if late else 1 + number % 2
        assert made.offer(0.0, request(number, predicted=tokens, tenant=tenant, preemptible=False)) is None
    counts = {1: 0, 2: 0}
    tenant_of = {number: entry.request.client.tenant for number, entry in made.entries.items()}
    while max(counts.values()) < 40:
        (number,) = sent(made.schedule(0.0))
        counts[tenant_of[number]] += 1
        made.on_progress(0.0, number, tokens)
        made.remove(0.0, number)
        if max(counts.values()) < 40:
            assert counts[1] / weight == pytest.approx(counts[2], abs=1 + 1 / weight + 1e-6)
