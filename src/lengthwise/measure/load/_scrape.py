"""A server's own numbers while it was under load: its ``/metrics``, every second."""

from __future__ import annotations

import asyncio
import math
import re
import time
from typing import Any

from lengthwise.backend.openai import Client, RequestError

EVERY_S = 1.0
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_SKIPPED = re.compile(r"_created$|^python_|^process_|^http_")
_KEPT_BUCKETS = "iteration_tokens_total_bucket"
"""How many tokens steps had, which a calibration reads; other histograms are told by their sum and count."""
_BOUND = re.compile(r'(?:^|,)le="([0-9.eE+]+)"')


async def look(client: Client, within_s: float) -> dict[str, float] | None:
    """What a server's ``/metrics`` says now, as ``samples``; None where it does not in time."""
    try:
        async with asyncio.timeout(within_s):
            text = await _page(client)
    except TimeoutError:
        return None
    return None if text is None else samples(text)


async def _page(client: Client) -> str | None:
    try:
        status, text = await client.fetch("GET", f"{client.server.root}/metrics")
    except RequestError:
        return None
    return text if status == 200 and isinstance(text, str) else None


class Scrape:
    """Columns of what ``/metrics`` told: a row a second, summed over labels, and a histogram's buckets by bound."""

    def __init__(self, client: Client, start_s: float) -> None:
        self._client, self._start_s = client, start_s
        self.at_s: list[float] = []
        self.took_s: list[float] = []
        self.rows: list[dict[str, float]] = []

    async def run(self) -> None:
        """Asks until it is cancelled; a second in which the server does not answer is left out."""
        while True:
            begun_s = time.perf_counter()
            text = await _page(self._client)
            if text is not None:
                self.at_s.append(begun_s - self._start_s)
                self.took_s.append(time.perf_counter() - begun_s)
                self.rows.append(samples(text))
            await asyncio.sleep(max(0.0, begun_s + EVERY_S - time.perf_counter()))

    def columns(self) -> dict[str, list[float | None]]:
        """[seconds] a column a metric; "at_s", when it was asked, and "took_s" until the answer was there.

        None where a metric was not told.
        """
        names = sorted({name for row in self.rows for name in row})
        columns: dict[str, list[float | None]] = {"at_s": [*self.at_s], "took_s": [*self.took_s]}
        return columns | {n: [row.get(n) for row in self.rows] for n in names}


def samples(text: str) -> dict[str, float]:
    """Metrics in Prometheus' text format, by name, summed over labels; tokens of steps also by bucket."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        name = None if match is None else _column(match[1], match[2] or "")
        if match is None or name is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            found[name] = found.get(name, 0.0) + value
    return found


def _column(name: str, labels: str) -> str | None:
    """What a sample is kept as; of buckets those that are kept, by their bound: ``NAME{le="8"}``."""
    if _SKIPPED.search(name):
        return None
    if not name.endswith("_bucket"):
        return name
    bound = _BOUND.search(labels) if name.endswith(_KEPT_BUCKETS) else None
    return None if bound is None else f'{name}{{le="{float(bound[1]):g}"}}'
