"""A plan looked for in a thread, and one to begin with, which is there soon."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from lengthwise.schema.app import AppPlan

Look = Callable[[Callable[[AppPlan], None]], AppPlan]
"""Finds a plan, and tells before that with which to begin."""


class Seeking:
    """Looks at once; a process that ends does not wait for it.

    Args:
        look: Finds the plan; whoever asks for one hears of its errors.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._first: Future[AppPlan] = Future()
        self._whole: Future[AppPlan] = Future()
        threading.Thread(target=self._run, name="plan", daemon=True).start()

    def _run(self) -> None:
        try:
            made = self._look(self._first.set_result)
        except BaseException as error:  # noqa: BLE001 - whoever asks for the plan is told
            self._whole.set_exception(error)
            if not self._first.done():
                self._first.set_exception(error)
        else:
            self._whole.set_result(made)
            if not self._first.done():
                self._first.set_result(made)

    def first(self) -> AppPlan:
        """The plan to begin with, once it is there."""
        return self._first.result()

    def whole(self) -> AppPlan:
        """The plan, once it is found."""
        return self._whole.result()
