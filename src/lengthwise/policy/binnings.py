"""Binning policies: the bin of an arriving request."""

from __future__ import annotations

from lengthwise.policy.contracts import binning


@binning(bins=1)
def one():
    """One bin for all requests: full batches in order of arrival."""
    return 0
