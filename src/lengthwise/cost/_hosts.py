"""The engine's host by name, in place of what a cost source says of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lengthwise.cost._roofline_errors import HOST_LOG_SD
from lengthwise.cost.roofline import ENGINE_HOSTS, HostOverhead
from lengthwise.schema.cost_tables import CostTables, PartError
from lengthwise.schema.errors import InputError, UnknownNameError

HOST_NAMES = ("default", *ENGINE_HOSTS)
"""``default`` keeps what the cost source says: BLIS' measurement for the roofline, a profile's own where it has one."""


def host_overhead(host: str | HostOverhead) -> HostOverhead | None:
    """The seconds of a host; None for "default", which leaves the cost source its own.

    Raises:
        UnknownNameError: No engine has this name.
        InputError: The seconds are negative or not finite.
    """
    if isinstance(host, str):
        if host not in HOST_NAMES:
            raise UnknownNameError("host", host, HOST_NAMES)
        return ENGINE_HOSTS.get(host)
    if not all(0 <= value < float("inf") for value in (host.step_s, host.sequence_s)):
        raise InputError(
            "a host's step_s and sequence_s must be finite seconds from 0; they are "
            f"{host.step_s!r} and {host.sequence_s!r}"
        )
    return host


def with_host(tables: CostTables, host: str | HostOverhead) -> CostTables:
    """The tables with ``host`` in place of their own; as they are for "default".

    Where the tables know their errors, that of the host becomes the roofline's assumption: whatever was known
    of the old one says nothing of the new.

    Raises:
        UnknownNameError: No engine has this name.
        InputError: The seconds are negative or not finite.
    """
    overhead = host_overhead(host)
    if overhead is None:
        return tables
    seqs = np.arange(len(tables.host_s))
    told = f"host of {host}" if isinstance(host, str) else f"host of {overhead.step_s:g} s a step"
    errors = tuple(PartError("host", HOST_LOG_SD) if e.part == "host" else e for e in tables.errors)
    return replace(
        tables,
        host_s=np.asarray(overhead.step_s + overhead.sequence_s * seqs, dtype=np.float64),
        source=f"{tables.source}, {told}" if tables.source else told,
        errors=errors,
    )
