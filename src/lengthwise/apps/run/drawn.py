"""Tasks without texts: what a draw says comes to be, for runs of lengths alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from lengthwise.apps.launch.contracts import COMPLETIONS, Ask
from lengthwise.apps.run.contracts import Asked, Outputs
from lengthwise.schema.app_tasks import TaskDraw, Tasks


@dataclass(frozen=True)
class Drawn:
    """A decider that asks for what is present in a draw, and skips the rest.

    Attributes:
        tasks: Of the application.
        draw: One way in which it may turn out.
    """

    tasks: Tasks
    draw: TaskDraw

    def decide(self, task: int, outputs: Outputs) -> Asked | None:  # noqa: ARG002 - the contract's
        """A request that says which task it is; None: the draw has it not."""
        if not self.draw.present[task]:
            return None
        words = f"{self.tasks.models[self.tasks.model[task]]} {task} {self.draw.prompt_tokens[task]}"
        key = hashlib.sha256(words.encode()).hexdigest()
        return Asked(key, Ask(task, COMPLETIONS, {"max_tokens": int(self.tasks.max_tokens[task])}))
