"""The Gateway page: running gateways as their admin ports report them, and replays of a journal under other orders."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import os
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from lengthwise.gateway import observe
from lengthwise.report.formatting import UNKNOWN, amount, capitalized, percent, seconds
from lengthwise.schema.errors import InputError
from lengthwise.ui.page import Download, Outcome, Page, Values, fields_of, require_name, require_number
from lengthwise.ui.work import Task

DEFAULTS: dict[str, Any] = {
    "journal": None,
    "compare": "orders",
    "max_wait_s": 60.0,
    "windowed": False,
    "routers": ["all"],
}
TIMEOUT_S, MAX_STATE_BYTES = 3.0, 4 * 1024 * 1024
TOKEN = "LENGTHWISE_ADMIN_TOKEN"  # noqa: S105 - the variable with a user's token of the admin ports


def page(gateways: Sequence[str] = ()) -> Page:
    """Return the page.

    Args:
        gateways: Admin addresses of the gateways to show. The server requests no others. Raises InputError for a wrong
            one.
    """
    known = tuple(map(_address, gateways))
    return Page(
        "gateway",
        "Gateway",
        partial(choices, known),
        answers={"state": partial(live, known)},
        jobs={"replay": replay},
        downloads={"json": _json},
    )


def choices(gateways: Sequence[str]) -> dict[str, Any]:
    """Return the gateways, the routers of a replay, and the defaults of the fields."""
    return {"gateways": list(gateways), "routers": ["all", *observe.ROUTERS], "defaults": DEFAULTS}


def _address(given: str) -> str:
    with contextlib.suppress(ValueError):
        at = urlsplit(given)
        is_plain = not (at.username or at.password or at.query or at.fragment) and at.port != 0
        if at.scheme in ("http", "https") and at.hostname and is_plain:
            return given.rstrip("/")
    raise InputError(
        f'a gateway must be the admin address that lengthwise serve prints, such as "http://127.0.0.1:8001"; '
        f"it is {given!r}"
    )


# A running gateway
def live(gateways: Sequence[str], values: Values, task: Task) -> dict[str, Any]:
    """Return what a gateway reports now. Raises InputError if it does not answer, or with something else."""
    address = require_name("gateway", fields_of(values, {"gateway": "", "complete": True})["gateway"], gateways)
    state = fetched_state(address, task)
    try:
        return {"address": address, **_shown(state)}
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        raise _not_a_gateway(address) from None


def _not_a_gateway(address: str) -> InputError:
    return InputError(
        f"{address}/state.json is not the state of a gateway; give --gateway the admin address that lengthwise serve "
        "of the same version prints"
    )


class _Until(io.RawIOBase):
    """Reads from a connection until ``end_s``. A timeout is that of one read, and a slow server needs many."""

    def __init__(self, end_s: float, connection: socket.socket) -> None:
        self._end_s, self._connection = end_s, connection

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if (left_s := self._end_s - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


def fetched_state(address: str, task: Task) -> Any:
    """Return the JSON of an admin port. Raises InputError if there is none within TIMEOUT_S and MAX_STATE_BYTES."""
    at, end_s = urlsplit(address), time.monotonic() + TIMEOUT_S
    connect = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
    body = bytearray()
    try:
        with contextlib.closing(connect(at.hostname or "", at.port, timeout=TIMEOUT_S)) as connection:
            token = os.environ.get(TOKEN, "")
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request("GET", f"{at.path}/state.json", headers=headers)  # which follows no redirect
            response = http.client.HTTPResponse(_Until(end_s, connection.sock))  # type: ignore[arg-type]
            response.begin()
            while response.status == http.HTTPStatus.OK and (part := response.read1(1 << 16)):
                body += part
                task.check()
                if len(body) > MAX_STATE_BYTES:
                    raise _not_a_gateway(address)
        if response.status == http.HTTPStatus.UNAUTHORIZED:
            raise InputError(f"{address} needs the token of a user: set the environment variable {TOKEN}")
        if response.status != http.HTTPStatus.OK:
            raise InputError(f"{address}/state.json answers with status {response.status}; is it an admin address?")
        return json.loads(body)
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"the gateway at {address} does not answer ({error}); is it running?") from None
    except (ValueError, RecursionError):
        raise _not_a_gateway(address) from None


def _shown(state: Any) -> dict[str, Any]:
    queue, workers, samples = state["queue"], state["workers"], state["samples"]["rows"]
    up = sum(bool(one["up"]) for one in workers)
    waiting, running = int(queue["waiting"]), int(queue["running"])
    busy = f"{waiting:,} waiting, {running:,} in engines" if waiting or running else "idle"
    longest = f"the longest for {seconds(_number(queue['oldest_wait_s']))}" if waiting else ""
    wait, backlog = (seconds(_number(queue[name])) if up else UNKNOWN for name in ("predicted_wait_s", "backlog_s"))
    return {
        "status": f"{busy}; mode {state['mode']}, {up} of {len(workers)} engines up, router {state['router']}, "
        f"running for {seconds(_number(state['up_s']))}",
        "cards": [
            _card("Waiting", f"{waiting:,}", "requests", longest),
            _card("In engines", f"{running:,}", "requests"),
            _card("Estimated wait", wait, "", "of a new request"),
            _card("Backlog", backlog, "", f"{amount(_number(queue['backlog_tokens']))} tokens"),
            _card("Output", amount(_number(samples[-1][3])) if samples else UNKNOWN, "tokens/s"),
            _change_card(state["change"]),
        ],
        "samples": [[_finite(row[at]) for at in range(4)] for row in samples],
        "engines": [_engine(one, workers) for one in workers],
        "times": [
            [one["name"], f"{one['count']:,}", *(seconds(_number(one[k][i])) for k, i in _TIMES)]
            for one in state["times"]
        ],
        "policies": [_policy(one) for one in state["policies"]],
        "errors": [
            [f"{seconds(_number(one['ago_s']))} ago", str(one["what"]), str(one["model"]), str(one["tenant"]),
             str(one["worker"]), f"{one['count']:,}"]
            for one in state["troubles"]
        ],
    }  # fmt: skip


_TIMES = [("jct", 0), ("jct", 1), ("jct", 2), ("jct", 3), ("ttft", 0), ("ttft", 3), ("queue", 0), ("queue", 3)]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(value)
    return number


def _card(label: str, value: str, unit: str = "", interval: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "unit": unit, "interval": interval, "model": ""}


def _change_card(change: Any) -> dict[str, str]:
    """Return the change of the mean JCT against FCFS, with the label and the interval of the admin page."""
    if change is None:
        return _card("Mean JCT against FCFS", UNKNOWN, "", "estimated from 200 requests on")
    label = "Mean JCT against FCFS" + ("" if change["in_use"] else f" if {change['order']}")
    if not change["is_known"] or change["value"] is None:
        return _card(label, UNKNOWN, "", "the engines do not behave as fitted")
    value, *ends = (observe.format_share(_number(change[key])) for key in ("value", "low", "high"))
    interval = "" if change["low"] is None else f"{' to '.join(ends)}; "
    return _card(label, value, "", f"{interval}simulated on {change['requests']:,} requests")


def _engine(one: Any, workers: Any) -> list[str]:
    sent = [other["dispatched"]["requests"] if other["dispatched"] else 0 for other in workers]
    own = one["dispatched"]["requests"] if one["dispatched"] else 0
    opened = "circuit open" if one["breaker"] == "open" else "down"
    condition = ("probing" if one["breaker"] == "half-open" else "up") if one["up"] else opened
    in_flight = f"{one['in_flight']} / {UNKNOWN if one['limit'] is None else one['limit']}"
    share = own / sum(sent) if sum(sent) else math.nan
    measured = (percent(_number(one["kv_used"])), amount(_number(one["waiting"])), amount(_number(one["tokens_per_s"])))
    models = ", ".join(map(str, one["models"]))
    return [str(one["name"]), condition, in_flight, *measured, percent(share), models, str(one["cause"])]


def _policy(one: Any) -> list[str]:
    def with_interval(values: Any, text: Callable[[Any], str]) -> str:
        value, low, high = (None,) * 3 if values is None else values
        interval = "" if low is None else f" ({text(low)} to {text(high)})"
        return UNKNOWN if value is None else text(value) + interval

    columns = [with_interval(one["jct"][at], seconds) for at in (0, 3)]
    changes = [with_interval(one[name], observe.format_share) for name in ("mean_change", "p99_change")]
    return [f"{one['name']}, {one['kind']}", f"{one['count']:,}", *columns, *changes]


# A replay of a journal
def replay(values: Values, task: Task) -> Outcome:
    """Replay a journal under other orders or routers, as ``lengthwise serve --report`` does.

    Raises InputError for unknown fields and names, for wrong values, and for a file that is no journal.
    """
    fields = _checked(values)
    journal = task.session.file(fields["journal"])
    task.report("reading the journal", 0, 0)
    if fields["compare"] == "routers":
        words = [word for name in fields["routers"] for word in ("--router", name)]
        routing = observe.routing_gain(observe.of_journal(journal), fields["routers"])
        answer, values = _routed(routing), asdict(routing)
        kind, settings = "routing_gain", ""
    else:
        from lengthwise.config import load_gateway

        bound_s = fields["max_wait_s"]
        overrides = [] if bound_s == DEFAULTS["max_wait_s"] else [f"order.max_wait_s={bound_s:.15g}"]
        overrides += ['order.mode="windowed"'] if fields["windowed"] else []
        words = [word for setting in overrides for word in ("--set", setting)]
        order = load_gateway(None, overrides, ["http://localhost"]).config.order  # which is required, not contacted
        found = observe.report(journal, order, progress=partial(task.report, "replays"))
        answer, values = _ordered(found), observe.as_json(found)
        engines = 'engines = ["http://localhost:8100"] # --report contacts none'
        kind, settings = "gain", f"{engines}\n\n[order]\n" + "".join(f"{one[6:]}\n" for one in overrides)
    command = shlex.join(["lengthwise", "serve", "--report", journal.name, *words])
    return Outcome(answer | {"command": command, "scenario": settings}, (kind, values))


def _ordered(found: Any) -> dict[str, Any]:
    from lengthwise.gateway.observe.ordering_gain import duration, format_change, service_lines, times_table

    def cell(seconds_: float | None, change: Any) -> list[str]:
        return ["" if seconds_ is None else seconds(seconds_), "" if change is None else format_change(change)]

    cards = [_card("Observed mean JCT", seconds(found.observed_jct_s)), _card("Waiting", percent(found.waited_share))]
    cards[1]["interval"] = "of the time from arrival to finish"
    cards += [_change(f"Mean JCT, {one.name}", one.mean) for one in found.orders]
    rows = times_table(found)
    return {
        "best": capitalized(f"{found.decision}: {found.description}"),
        "about": f"{found.requests:,} requests over {duration(found.span_s)}. {100 * found.level:g} % intervals, by a "
        "block bootstrap of this traffic.",
        "cards": cards if rows else [],
        "heads": ["order", "mean JCT", "change against FCFS", "P99 JCT", "change against FCFS"],
        "rows": [[label, *cell(mean_s, mean), *cell(p99_s, p99)] for label, mean_s, mean, p99_s, p99 in rows],
        "notes": service_lines(found),
    }


def _change(label: str, change: Any) -> dict[str, str]:
    value, low, high = map(observe.format_share, (change.value, change.low, change.high))
    return _card(label, value, "", f"{low} to {high}")


def _routed(found: Any) -> dict[str, Any]:
    from lengthwise.gateway.observe.ordering_gain import duration, format_change

    def cells(times_s: tuple[float, float], changes: Any) -> list[str]:
        texts = [format_change(change) for change in changes] or ["", ""]
        return [seconds(times_s[0]), texts[0], seconds(times_s[1]), texts[1]]

    observed = [["observed", *cells(found.observed_ttft_s, ()), *cells(found.observed_jct_s, ()), ""]]
    rows = [
        [one.name, *cells(one.ttft_s, one.ttft), *cells(one.jct_s, one.jct), percent(one.cached_share)]
        for one in found.routers
    ]
    heads = [head for name in ("TTFT", "JCT") for head in (f"mean {name}", "change", f"P99 {name}", "change")]
    return {
        "best": found.description,
        "about": f"{found.requests:,} requests over {duration(found.span_s)}. {100 * found.level:g} % intervals, by a "
        "paired block bootstrap of this traffic. Changes are against one central queue.",
        "cards": [_change(f"Mean JCT, {one.name}", one.jct[0]) for one in found.routers[1:]],
        "heads": ["router", *heads, "cached"],
        "rows": observed + rows if rows else [],
        "notes": list(found.assumptions),
    }


def _checked(values: Values) -> Values:
    fields = fields_of(values, DEFAULTS)
    if not fields["journal"]:
        raise InputError("choose the journal that lengthwise serve --journal wrote")
    require_name("comparison", fields["compare"], ("orders", "routers"))
    require_number("max_wait_s", fields["max_wait_s"])
    if not isinstance(fields["windowed"], bool):
        raise InputError(f"windowed must be true or false; it is {fields['windowed']!r}")
    if not isinstance(fields["routers"], list) or not 0 < len(fields["routers"]) <= len(observe.ROUTERS) + 1:
        raise InputError(f"routers must be a list of at least one name; it is {fields['routers']!r}")
    for name in fields["routers"]:
        require_name("router", name, ("all", *observe.ROUTERS))
    return fields


def _json(outcome: Outcome, _: Values) -> Download:
    from lengthwise.report.json_file import json_text

    return Download("replay.json", "application/json", json_text(*outcome.source).encode())
