"""A look back in a process of its own: rows come in as lines of JSON, the finding goes out as JSON."""

from __future__ import annotations

import json
import os
import sys

from lengthwise.gateway.config import Order
from lengthwise.gateway.observe.ordering_gain import as_json, gain
from lengthwise.gateway.observe.trace import of_rows
from lengthwise.gateway.telemetry import from_dict


def main() -> None:
    """Reads the order's settings and then rows from stdin; writes the finding to stdout."""
    os.nice(10)
    order = Order(**json.loads(sys.stdin.readline()))
    found = gain(of_rows(from_dict(json.loads(line)) for line in sys.stdin), order)
    sys.stdout.write(json.dumps(as_json(found)))


if __name__ == "__main__":
    main()
