"""Large runs in bounded memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, sys
import numpy as np
from lengthwise.apps.ledger import open_ledger
from lengthwise.schema.app import Tasks

def mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

n = 1_000_000
zeros, number = np.zeros(n, np.int64), np.arange(n)
start = number - (number + 3) // 4
tasks = Tasks(tuple("abcd"), ("m",), number % 4, zeros, zeros, zeros, zeros, zeros, zeros, zeros,
    np.append(start, start[-1] + 1), number[number % 4 > 0] - 1, np.ones(n * 3 // 4, np.int64), zeros - 1)
before = mib()
ledger = open_ledger(sys.argv[1])
ledger.open("run", tasks)
first = seen = 0
while rows := ledger.rows(first, 10_000):
    seen, first = seen + len(rows), rows[-1].task + 1
assert seen == n and sum(ledger.counts().values()) == n
print(mib() - before)
"""


@pytest.mark.slow
def test_a_million_tasks_are_laid_out_and_listed_in_bounded_memory(place):
    done = subprocess.run(
        [sys.executable, "-c", CODE, place()], check=True, capture_output=True, text=True, timeout=300
    )
    # SQLite's cache of 64 MiB, the arrays of edges, one page of rows (seen: 70 to 95 MiB).
    assert float(done.stdout) < 200
