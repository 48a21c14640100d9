"""A takeover of one's own: a seat changes hands for a request of a quarter of the length, once a request.

In a scenario: ``[scheduler]`` with ``takeover = "policy_takeover.py:quarter"``.
"""

from lengthwise.policy import takeover


@takeover
def quarter(waiting_remaining_tokens, running_remaining_tokens, preemptions):
    """Above 0: the waiting request takes the running one's place."""
    return running_remaining_tokens - 4 * waiting_remaining_tokens if preemptions == 0 else 0.0
