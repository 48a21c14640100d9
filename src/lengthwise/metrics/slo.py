"""What users were promised, and who got it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.metrics.columns import request_column
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import RequestRecords, Status

Bools = npt.NDArray[np.bool_]

_LIMITS = ("ttft_s", "tpot_s", "jct_s")


@dataclass(frozen=True)
class Slo:
    """Limits that one request must meet to count as good; None sets no limit.

    A request without a second token has no TPOT and meets that limit. Times between single
    tokens (TBT) are pooled over requests, so that a limit on them cannot judge one request:
    compare ``Summary.tbt_s`` with it instead.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None

    def __post_init__(self) -> None:
        for name, limit in self.limits.items():
            if not limit > 0:
                raise InputError(f"an SLO must be a positive number of seconds; {name} is {limit}")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {name: getattr(self, name) for name in _LIMITS if getattr(self, name) is not None}

    def met(self, requests: RequestRecords) -> dict[str, Bools]:
        """[n] which requests finished and kept each limit; under "all", every limit."""
        finished = requests.status == Status.FINISHED
        good = {"all": finished.copy()}
        for name, limit in self.limits.items():
            value = request_column(requests, name)
            with np.errstate(invalid="ignore"):
                kept = value <= limit
            if name == "tpot_s":
                kept |= requests.output_tokens == 1
            good[name] = kept & finished
            good["all"] &= kept
        return good
