"""The load generator: requests to a real server when they are due, and what came of them."""

from lengthwise.measure.load.bench import INTERRUPTED, bench

__all__ = ["INTERRUPTED", "bench"]
