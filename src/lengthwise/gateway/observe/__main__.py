"""Estimate the gain of ordering in a process of its own: JSON lines on stdin, JSON on stdout."""

from __future__ import annotations

import json
import os
import sys

from lengthwise.gateway.config import Order
from lengthwise.gateway.observe.ordering_gain import as_json, gain
from lengthwise.gateway.observe.trace import of_rows
from lengthwise.gateway.telemetry import from_dict


def main() -> None:
    """Read the table [order] and then rows of requests from stdin. Write the estimated gain to stdout."""
    os.nice(10)
    order = Order(**json.loads(sys.stdin.readline()))
    estimate = gain(of_rows(from_dict(json.loads(line)) for line in sys.stdin), order)
    sys.stdout.write(json.dumps(as_json(estimate)))


if __name__ == "__main__":
    main()
