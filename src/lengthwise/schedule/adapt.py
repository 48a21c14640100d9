"""A deployed schedule that follows live lengths: watched, planned anew after an alarm, and again once more is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lengthwise.schedule._seen_lengths import ENOUGH, facts_of, lengths_since
from lengthwise.schedule.choose import Planner
from lengthwise.schedule.drift import left_alone
from lengthwise.schedule.estimate import Estimator
from lengthwise.schedule.replan import Terms, late_share, replan
from lengthwise.schedule.watch import Alarm, Watch, Watcher
from lengthwise.schema.adaptation import Adaptation, LengthFacts
from lengthwise.schema.schedule_row import ScheduleRow


class Adapter:
    """What runs, and what is to run as lengths move. Equal requests and seeds give equal answers.

    Whoever serves tells it each request in the order of arrival, and takes over ``deployed`` where an answer says so.

    Args:
        planner: Of the lengths that were planned for.
        deployed: What runs.
        bound_s: Latency that must be held; infinite: any.
        requests: How many requests the planned lengths were counted over; None: they are known.
        watch: How lengths are watched; None: as usual.
        terms: When a change is worth it; None: as usual.

    Attributes:
        deployed: What is to run now.
        task: The lengths that it was last planned for.
        bound_s: As given.
    """

    def __init__(
        self,
        planner: Planner,
        deployed: ScheduleRow,
        bound_s: float = math.inf,
        *,
        requests: int | None = None,
        watch: Watch | None = None,
        terms: Terms | None = None,
    ) -> None:
        self._planner, self.bound_s, self._terms = planner, bound_s, terms or Terms()
        self.deployed, self.task = deployed, planner.estimator.setting.task
        self._first = deployed
        self.watcher = Watcher(self.task, requests, watch or Watch())
        self._before = self.task
        self._last: Alarm | None = None
        self._since: list[tuple[int, int]] = []

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> Adaptation | None:
        """One more request, as ``Watcher.observe`` takes it; an answer if it makes one due.

        Raises:
            InputError: As there.
        """
        alarm = self.watcher.observe(prompt_tokens, output_tokens, at_s)
        if alarm is not None:
            self._before = self.task
            return self._adapted(alarm, first=True)
        return self._known_better(prompt_tokens, output_tokens, at_s)

    @property
    def planned_lengths(self) -> LengthFacts:
        """The lengths that the first schedule was planned for."""
        setting = self._planner.estimator.setting
        return facts_of(setting.task, setting.assumptions.level, setting.assumptions.output_tokens)

    def _known_better(self, prompt_tokens: int, output_tokens: int, at_s: float) -> Adaptation | None:
        """Planned once more when enough requests have come since an alarm to count their lengths."""
        if self._last is None:
            return None
        self._since.append((prompt_tokens, output_tokens))
        if len(self._since) < ENOUGH:
            return None
        prompts, outputs = np.array(self._since, dtype=np.int64).T
        known = replace(
            self._last,
            request=self.watcher.observed,
            at_s=at_s,
            prompt_tokens=prompts,
            output_tokens=outputs,
        )
        return self._adapted(known, first=False)

    def _adapted(self, alarm: Alarm, *, first: bool) -> Adaptation:
        few = len(alarm.output_tokens) < ENOUGH
        pairs = zip(alarm.prompt_tokens.tolist(), alarm.output_tokens.tolist(), strict=True)
        self._last, self._since = (alarm, list(pairs)) if few else (None, [])
        setting = self._planner.estimator.setting
        task = lengths_since(self._before, alarm, setting.model.max_model_len)
        estimator = Estimator(task, setting.cluster, setting.model, setting.tables, setting.assumptions)
        planner = self._planner.anew(estimator)
        as_ever = {"worst_case": planner.worst_case}
        change = replan(planner, self.deployed, self._before, self.bound_s, self._terms)
        self.task = task
        if change.made and change.new is not None:
            self.deployed = change.new
        return Adaptation(
            request=alarm.request,
            at_s=alarm.at_s,
            began=alarm.began,
            began_s=alarm.began_s,
            requests=len(alarm.output_tokens),
            sides=alarm.sides,
            evidence=alarm.evidence,
            first=first,
            change=change,
            first_held_s=left_alone(estimator, self._first, **as_ever)[1],
            first_late_share=late_share(estimator, self._first, self.bound_s, **as_ever),
        )


__all__ = ["Adapter"]
