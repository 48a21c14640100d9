"""A custom rank policy: shortest job first with aging, so that no request waits without bound.

In a scenario: ``[scheduler]`` with ``rank = "policy_aging.py:aging_shortest_first"``.
"""

from lengthwise.policy import rank

TOKENS_PER_SECOND = 100.0
"""Tokens by which each second of waiting reduces the rank of a request."""


@rank
def aging_shortest_first(arrival_s, predicted_tokens):
    """Return the predicted output length, reduced by the waiting time."""
    # predicted - 100 * (now - arrival): all requests age at the same rate, so the order needs no clock.
    return predicted_tokens + TOKENS_PER_SECOND * arrival_s
