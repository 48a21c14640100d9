"""A server's own numbers while it was under load: its ``/metrics``, every second."""

from __future__ import annotations

import asyncio
import math
import re
import time
from typing import Any

from lengthwise.backend.openai import Client, RequestError

EVERY_S = 1.0
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)")
_SKIPPED = re.compile(r"_bucket$|_created$|^python_|^process_|^http_")


class Scrape:
    """Columns of what ``/metrics`` told: a row a second, summed over labels, without histograms' buckets."""

    def __init__(self, client: Client, start_s: float) -> None:
        self._client, self._start_s = client, start_s
        self.at_s: list[float] = []
        self.rows: list[dict[str, float]] = []

    async def run(self) -> None:
        """Asks until it is cancelled; a second in which the server does not answer is left out."""
        url = f"{self._client.server.root}/metrics"
        while True:
            begun_s = time.perf_counter()
            try:
                status, text = await self._client.fetch("GET", url)
            except RequestError:
                status, text = 0, ""
            if status == 200 and isinstance(text, str):
                self.at_s.append(begun_s - self._start_s)
                self.rows.append(samples(text))
            await asyncio.sleep(max(0.0, begun_s + EVERY_S - time.perf_counter()))

    def columns(self) -> dict[str, list[float | None]]:
        """[seconds] a column a metric, and "at_s", when it was asked; None where it was not told."""
        names = sorted({name for row in self.rows for name in row})
        columns: dict[str, list[float | None]] = {"at_s": [*self.at_s]}
        return columns | {n: [row.get(n) for row in self.rows] for n in names}


def samples(text: str) -> dict[str, float]:
    """Metrics in Prometheus' text format, by name, summed over labels."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or _SKIPPED.search(match[1]):
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value):
            found[match[1]] = found.get(match[1], 0.0) + value
    return found
