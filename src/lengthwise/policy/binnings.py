"""Into which bin an arriving request goes."""

from __future__ import annotations

from lengthwise.policy.contracts import binning


@binning(bins=1)
def one():
    """One bin for all: full batches in the order of arrival."""
    return 0
