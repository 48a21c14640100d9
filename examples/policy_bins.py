"""Custom bins: below 64 predicted tokens, below 128, below 256, and longer.

In a scenario: ``[scheduler]`` with ``policy = "multi_bin"`` and ``binning = "policy_bins.py:by_doubling"``.
"""

from lengthwise.policy import binning


@binning(bins=4)
def by_doubling(predicted_tokens):
    """Return the number of the bin, from 0."""
    number, edge = 0, 64
    while number < 3 and predicted_tokens >= edge:
        number, edge = number + 1, 2 * edge
    return number
