"""Our rules beside vLLM's: at the first error they are given up, and the engine goes on by its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("vllm.lengthwise")
"""vLLM's own logger shows what its children say."""


class Guarded:
    """Goes before vLLM's own scheduler class."""

    lengthwise: Any = None
    """Our rules; None: the engine's own."""
    _given_up = "ordering failed; from now on this engine keeps its own order"

    def _lengthwise(self, work: Callable[[Any], Any]) -> Any:
        rules = self.lengthwise
        if rules is None:
            return None
        try:
            return work(rules)
        except Exception:
            self.lengthwise = None
            log.exception("lengthwise: %s", self._given_up)
            return None
