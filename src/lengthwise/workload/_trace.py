"""What a reader hands over: requests in the order of the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests as a file has them, before they are sorted, moved to 0 and cut.

    Attributes:
        arrival_s: [n] seconds on any clock.
        prompt_tokens: [n], from 0.
        output_tokens: [n], from 0; requests of 0 tokens are left out later.
        extra: Further columns of length n, under their names in the workload.
        name: For tables and reports.
    """

    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    name: str = ""

    def take(self, rows: npt.NDArray[np.int64] | slice) -> Trace:
        """The trace of these rows, in their order."""
        extra = {name: values[rows] for name, values in self.extra.items()}
        return Trace(
            self.arrival_s[rows], self.prompt_tokens[rows], self.output_tokens[rows], extra, self.name
        )
