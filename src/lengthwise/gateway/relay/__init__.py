"""One client's request over its life: sent to an engine, its answer passed on, cut, resumed, failed over."""

from __future__ import annotations

from lengthwise.gateway.relay._answer import Answer
from lengthwise.gateway.relay._resumable import obstacle
from lengthwise.gateway.relay._sessions import open_session
from lengthwise.gateway.relay.relay import Relay

__all__ = ["Answer", "Relay", "obstacle", "open_session"]
