"""A preemption of one's own: a seat changes hands for a request of a quarter of the length, once a request.

In a scenario: ``[scheduler]`` with ``preemption = "policy_preemption.py:quarter"``.
"""

from lengthwise.policy import preemption


@preemption
def quarter(waiting_remaining_tokens, running_remaining_tokens, preemptions):
    """Above 0: the waiting request takes the running one's place."""
    return running_remaining_tokens - 4 * waiting_remaining_tokens if preemptions == 0 else 0.0
