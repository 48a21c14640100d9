"""A progress bar's column: evaluations a second."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.text import Text


class RateColumn(ProgressColumn):
    """How fast a task goes; empty while that is not known."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g}/s", style="progress.data.speed")
