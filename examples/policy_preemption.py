"""A custom preemption policy: a waiting request preempts one that is more than four times as long, at most once.

In a scenario: ``[scheduler]`` with ``preemption = "policy_preemption.py:quarter"``.
"""

from lengthwise.policy import preemption


@preemption
def quarter(waiting_remaining_tokens, running_remaining_tokens, preemptions):
    """Return a value above 0 where the waiting request preempts the running one."""
    return running_remaining_tokens - 4 * waiting_remaining_tokens if preemptions == 0 else 0.0
