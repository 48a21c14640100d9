"""Whose fault a failed request was."""

from __future__ import annotations

from lengthwise.apps.launch.contracts import FailedError, Fault
from lengthwise.backend.openai import RequestError

_REFUSED = {"http 400", "http 413", "http 422"}
_BUSY = {"http 429", "http 503"}
_UNREACHED = {"refused", "reset", "no connection"}


def classified(error: RequestError) -> FailedError:
    """The failure with whose fault it was.

    A prompt that is too long, or a field that the engine does not take, is the request's. An engine that is full says
    so by 429 or 503. What cannot be reached, or resets the connection, may be dead. All else (5xx, an error in the
    stream, garbage, a stream that ends early or stands still) may go well the next time.
    """
    if error.reason in _REFUSED:
        fault = Fault.REQUEST
    elif error.reason in _BUSY:
        fault = Fault.BUSY
    else:
        fault = Fault.ENGINE if error.reason in _UNREACHED else Fault.ANSWER
    return FailedError(fault, str(error), error.retry_after_s or 0.0)
