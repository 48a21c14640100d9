"""Followers that behave as configured, and a world in virtual time whose schedule follows lengths."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from phase_worlds import PhaseWorld

from lengthwise import config
from lengthwise.gateway.config import Dispatch, Phases
from lengthwise.gateway.replanning import ArrivalOrder, ReplanEvent
from lengthwise.schedule import Monitor, ReplanOptions
from lengthwise.usecases import schedule_adaptation, schedule_plan

SMALL = """
[workload]
prompt = { kind = "uniform", low = 100, high = 500 }
output = { kind = "uniform", low = 2, high = 16 }
request_rate = 1
num_requests = 60
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
tp = 2
[engine]
gpu_memory_utilization = 0.4
[schedule]
latency_bound = "4s"
strategies = ["rra"]
"""


@dataclass
class Report:
    """Gives another schedule at the third request, and does at the fifth what ``then`` specifies."""

    then: str = ""
    false_positive_rate: float = 0.01
    evidence: float = 1.0
    seen: int = 0

    def observe(self, prompt_tokens, output_tokens, at_s):
        assert at_s >= 0
        self.seen += 1
        self.evidence = float(self.seen)
        if self.seen == 3:
            return ReplanEvent((f"changed after {prompt_tokens} + {output_tokens}",), Phases(3, 7), "RRA, B_E = 3")
        if self.seen == 5 and self.then == "raises":
            raise ValueError("no such lengths")
        if self.seen == 5 and self.then == "dies":
            os._exit(3)
        if self.seen == 5 and self.then == "closes":
            os.closerange(3, 256)  # its answers, too
        if self.seen == 5 and self.then in ("hangs", "closes"):
            time.sleep(60)
        return None


def refused():
    raise ValueError("there is no such scenario")


def planned_small(*given):
    """(scenario, schedule) of the small scenario."""
    requested = config.loads(SMALL, overrides=given)
    return requested, schedule_plan.planned_run(requested)


def follow_small(client_request, planned, *, max_num_seqs=200, seed=0, **terms):
    """Who follows it, here and not in another process."""
    watch = Monitor(min_requests=100, seed=seed)
    return schedule_adaptation.follower_of(
        client_request, planned, schedule_adaptation.FollowOptions(watch, ReplanOptions(**terms), max_num_seqs)
    )


class FollowWorld(PhaseWorld):
    """Engines in virtual time; planning takes none of it."""

    def __init__(self, follower, phases, jobs, **named):
        self.follower, self.order = follower, ArrivalOrder()
        self.news, self.schedules = [], [(0.0, phases)]
        super().__init__(phases, jobs, **named)

    def arrives(self, job):
        super().arrives(job)
        self.order.on_arrival(job.number)

    def over(self, job):
        super().over(job)
        lengths = None if job.stopped else (job.prompt_tokens, job.tokens)
        for one in self.order.on_end(job.number, lengths, self.now_s):
            news = self.follower.observe(*one)
            if news is not None:
                self.hear(news)

    def hear(self, news):
        self.news.append((self.now_s, news))
        if news.phases is not None and news.phases != self.schedules[-1][1]:
            self.schedules.append((self.now_s, news.phases))
            made = self.scheduler
            made.configure(self.now_s, made.order, made.admission, Dispatch(phases=news.phases))

    def between(self, from_s, to_s):
        """Whole phases that began then."""
        return [one for one in self.phases if from_s <= one.started_s < to_s and one.cause == "steps"]
