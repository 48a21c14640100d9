"""The process of a follower: reads lengths, writes what came of them, ends with its parent."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from typing import Any, BinaryIO

from lengthwise.gateway.follow.told import Follower, Lengths, News

LENGTH = struct.Struct("<I")


def main() -> None:
    """Answers until its input ends. What it prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked = sys.stdin.buffer
    first = _read(asked)
    if first is None:
        return
    try:
        follower: Follower = pickle.loads(first)()  # noqa: S301 - the parent's own words
    except Exception as error:  # noqa: BLE001 - the parent is told, whatever it is
        _write(answers, {"refused": f"{type(error).__name__}: {error}"})
        return
    _write(answers, {"refused": "", "false_alarms": follower.false_alarms})
    while (payload := _read(asked)) is not None:
        _write(answers, _answer(follower, pickle.loads(payload)))  # noqa: S301


def framed(what: Any) -> bytes:
    """It as a message, its length before it."""
    payload = pickle.dumps(what)
    return LENGTH.pack(len(payload)) + payload


def _answer(follower: Follower, lengths: list[Lengths]) -> dict[str, Any]:
    """News by the place of the request that made them due, and the evidence after all."""
    news: list[News] = []
    for prompt_tokens, output_tokens, at_s in lengths:
        try:
            told = follower.observe(prompt_tokens, output_tokens, at_s)
        except Exception as error:  # noqa: BLE001 - what runs goes on
            why = f"planning anew failed, the schedule stays as it is: {type(error).__name__}: {error}"
            told = News((why,), failed=True)
        if told is not None:
            news.append(told)
    return {"news": news, "evidence": float(follower.evidence)}


def _read(file: BinaryIO) -> bytes | None:
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return file.read(LENGTH.unpack(head)[0])


def _write(file: BinaryIO, what: dict[str, Any]) -> None:
    file.write(framed(what))
    file.flush()
