"""The engine's host by name, in place of what a cost source says of it."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from lengthwise.cost._roofline_errors import HOST_LOG_SD, with_front_error
from lengthwise.cost.roofline import ENGINE_HOSTS, EXPERT_FRONTS, HostOverhead
from lengthwise.schema.cost_tables import CostTables, PartError
from lengthwise.schema.errors import InputError, UnknownNameError

HOST_NAMES = ("default", *ENGINE_HOSTS)
"""``default`` keeps what the cost source says: BLIS' measurement for the roofline, a profile's own where it has one."""


def host_overhead(host: str | HostOverhead, *, experts: bool = False) -> HostOverhead | None:
    """The seconds of a host; None for "default", which leaves the cost source its own.

    Args:
        host: A name of HOST_NAMES, or seconds.
        experts: Whether it serves a model with experts, before which a named engine's requests wait longer.

    Raises:
        UnknownNameError: No engine has this name.
        InputError: The seconds are negative or not finite.
    """
    if isinstance(host, str):
        if host not in HOST_NAMES:
            raise UnknownNameError("host", host, HOST_NAMES)
        named = ENGINE_HOSTS.get(host)
        return _before_experts(host, named) if experts and named is not None else named
    values = asdict(host)
    if not all(0 <= value < float("inf") for value in values.values()):
        told = ", ".join(f"{name} {value!r}" for name, value in values.items())
        raise InputError(f"a host must take finite seconds from 0; it has {told}")
    return host


def _before_experts(name: str, host: HostOverhead) -> HostOverhead:
    more = EXPERT_FRONTS[name]
    return replace(host, request_s=host.request_s + more.request_s, queue_s=host.queue_s + more.queue_s)


def with_host(tables: CostTables, host: str | HostOverhead, *, experts: bool = False) -> CostTables:
    """The tables with ``host`` and its front in place of their own; as they are for "default".

    ``experts`` as for ``host_overhead``.

    Where the tables know their errors, those of the host and its front become the roofline's assumptions: whatever
    was known of the old ones says nothing of the new.

    Raises:
        UnknownNameError: No engine has this name.
        InputError: The seconds are negative or not finite.
    """
    overhead = host_overhead(host, experts=experts)
    if overhead is None:
        return tables
    seqs = np.arange(len(tables.host_s))
    told = f"host of {host}" if isinstance(host, str) else f"host of {overhead.step_s:g} s a step"
    errors = tuple(PartError("host", HOST_LOG_SD) if e.part == "host" else e for e in tables.errors)
    return replace(
        tables,
        host_s=np.asarray(overhead.step_s + overhead.sequence_s * seqs, dtype=np.float64),
        source=f"{tables.source}, {told}" if tables.source else told,
        errors=with_front_error(errors, overhead.front) if errors else (),
        front=overhead.front,
    )
