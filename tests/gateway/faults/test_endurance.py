"""Every fault once under load: no request is lost. `python endurance.py` is the same for an hour."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from endurance import FAKETIME, FAULTS, Sent, expected_text
from hypothesis import given
from hypothesis import strategies as st
from postgres_world import programs

from lengthwise.testing.engine_server.completions import prompt_ids

PROBE = """
import ctypes, gc, os, signal
from lengthwise.gateway.config import Engine, GatewayConfig, Listen
from lengthwise.gateway.serve import serve
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

class Heap(ctypes.Structure):  # mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks".split()]
    _fields_ += [(name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")]

library.mallinfo2.restype = Heap

async def started(gateway):
    library.free(library.malloc(8 << 20))  # from here on glibc would take smaller blocks from its heap
    before = library.mallinfo2().hblks
    for _ in range(100):  # the first ones may fit between other blocks
        library.malloc(1 << 18)
    print(library.mallinfo2().hblks - before, *gc.get_threshold())
    os.kill(os.getpid(), signal.SIGTERM)

gc.set_threshold(100_000)  # as the command line has it
serve(GatewayConfig((Engine("http://127.0.0.1:1"),), listen=Listen(port=0, admin_port=None)), started=started)
"""
PERIOD_S = 2.5


def streamed(one: Sent) -> list[bytes]:
    """The events of a right stream, one token each."""
    ids = prompt_ids(one.body()["prompt"])
    texts = [expected_text(ids, count) for count in range(one.tokens + 1)]
    parts = [after.removeprefix(before) for before, after in itertools.pairwise(texts)]
    usage = {"prompt_tokens": len(ids), "completion_tokens": one.tokens, "total_tokens": len(ids) + one.tokens}
    events = [{"choices": [{"text": part}]} for part in parts if part] + [{"choices": [], "usage": usage}]
    return [*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events), b"data: [DONE]\n\n"]


@given(st.integers(0, 999), st.integers(3, 30), st.sampled_from(("", "lose", "double", "swap")), st.data())
def test_a_lost_doubled_or_swapped_event_is_found(number, tokens, change, data):
    one = Sent(number, "steady", chat=False, stream=True, tokens=tokens)
    events = streamed(one)
    at = data.draw(st.integers(0, len(events) - 1))
    other = streamed(Sent(number + 1, "steady", chat=False, stream=True, tokens=tokens))
    changes = {"": events[at : at + 1], "lose": [], "double": [events[at]] * 2}
    changed = [*events[:at], *changes.get(change, other[min(at, len(other) - 1) :][:1]), *events[at + 1 :]]
    one.judge(200, b"".join(changed))
    assert one.lost is (changed != events), (one.outcome, one.detail)


@pytest.mark.slow
def test_with_each_fault_once_no_request_is_lost():
    programs()
    assert FAKETIME or os.environ.get("CI") != "true", "Debian's package faketime is missing"
    kinds = len(FAULTS) - (FAKETIME is None)
    minutes = PERIOD_S * kinds / 60
    command = [Path(__file__).with_name("endurance.py"), "--minutes", minutes, "--period-s", PERIOD_S]
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["lost_requests"], found["problems"]) == ([], [])
    assert len(found["faults"]) == kinds
    assert done.returncode == found["lost"] == 0


@pytest.mark.slow
def test_memory_of_connections_returns_to_the_system():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    mapped, *thresholds = map(int, done.stdout.split())
    assert mapped > 50, done.stderr
    assert thresholds[0] < 1000, "connections that are closed would stay in memory"
