"""How each system that RRA and WAA are held against forms its steps, and what it keeps memory for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lengthwise import policy
from lengthwise.policy.contracts import DECODES_WAIT, NEW_PHASE
from lengthwise.schema.deployment import Scheduler

_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class System:
    """A system under its own name.

    Attributes:
        scheduler: Under which name ``lengthwise.policy`` has it; "": batches that nobody leaves (``whole_batches``).
        budgets: Tokens of a step that are tried, the usual one first; 0: without a budget.
        parts: Micro-batches of prompts for each of decodes that are tried; of whole batches alone.
        apart: Some replicas only prefill, the others only decode.
        cuts: Prompts may be cut to what is left of a budget; else the budget must hold the longest.
    """

    scheduler: str = ""
    budgets: tuple[int, ...] = (0,)
    parts: tuple[int, ...] = (1,)
    cuts: bool = False
    apart: bool = False

    @property
    def whole(self) -> bool:
        """Whether a batch runs until its longest output is done, nobody leaving before."""
        return not self.scheduler

    @property
    def reserves(self) -> bool:
        """Whether memory is kept for the longest request."""
        return self.scheduler == "orca"


KNOWN: dict[str, System] = {
    "fastertransformer": System(),
    "deepspeed-inference": System(parts=(2, 4)),
    "orca": System("orca"),
    "vllm": System("vllm_v0", (2048, 512, 8192)),
    "sarathi": System("sarathi", (512, 2048, 256, 1024), cuts=True),
    "vllm-v1": System("vllm_v1", (512, 2048, 256, 1024, 8192), cuts=True),
    "vllm-v1-disaggregated": System("vllm_v1", (2048, 8192, 512), cuts=True, apart=True),
}


def whole_batches(
    waiting: int, resident: int, phase_steps: int, max_num_seqs: int, parameter_0: int
) -> tuple[int, int, int]:
    """A batch is let in when the one before is through: prompts in ``parameter_0`` even parts, then its decodes."""
    parts = min(parameter_0, max_num_seqs)
    place = 0 if resident == 0 else phase_steps
    if waiting == 0 or place >= parts:
        return 0, 0, DECODES_WAIT
    share = max_num_seqs * (place + 1) // parts - max_num_seqs * place // parts
    flags = DECODES_WAIT
    if resident == 0:
        flags += NEW_PHASE
    return share, _UNLIMITED, flags


def scheduler_of(system: System, prompt_parts: int) -> Scheduler:
    """A system as a point on the axes of the engine's schedulers."""
    if not system.whole:
        return policy.scheduler(system.scheduler)
    batches = policy.batching(whole_batches)
    named = replace(batches, parameters=(prompt_parts,), name=f"whole_batches(parts={prompt_parts})")
    return Scheduler(batching=named, memory="paged")


__all__ = ["KNOWN", "System", "scheduler_of", "whole_batches"]
