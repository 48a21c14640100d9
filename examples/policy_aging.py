"""A rank policy of one's own: shortest job first, but nobody waits for ever.

In a scenario: ``[scheduler]`` with ``rank = "policy_aging.py:aging_shortest_first"``.
"""

from lengthwise.policy import rank

TOKENS_PER_SECOND = 100.0
"""How many tokens shorter a request counts for each second it has waited."""


@rank
def aging_shortest_first(arrival_s, predicted_tokens):
    """Shortest predicted output first; waiting makes a request shorter."""
    # predicted - 100 * (now - arrival): all age alike, so that the order needs no clock.
    return predicted_tokens + TOKENS_PER_SECOND * arrival_s
