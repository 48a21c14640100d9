"""What an emulated engine is: its model, its speed, its limits, and whose engine it plays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lengthwise.engine.step_time import StepTime, step_time
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.testing.engine_server.batch import Limits

KINDS = ("vllm", "sglang", "llama.cpp", "openai")


@dataclass(frozen=True)
class LinearSteps:
    """Seconds of a step as a line: fixed, each decode, each prompt token, each KV token that a decode reads."""

    fixed_s: float = 0.004
    decode_s: float = 0.0002
    prompt_token_s: float = 0.00002
    kv_token_s: float = 0.0

    def __call__(self, decodes: int, kv_tokens: int, prompts: Sequence[tuple[int, int]]) -> float:
        """The seconds of one step."""
        tokens = sum(chunk for chunk, _ in prompts)
        return (
            self.fixed_s
            + self.decode_s * decodes
            + self.prompt_token_s * tokens
            + self.kv_token_s * kv_tokens
        )


@dataclass(frozen=True)
class EngineSpec:
    """One emulated engine.

    Attributes:
        model: Its name, and with it every answer.
        kind: One of KINDS: whose routes, metrics and polarity of priorities.
        limits: Of batch and memory.
        steps: What a step takes.
        speed: Engine seconds that pass in a real one.
        max_model_len: Longest prompt and output together.
        mean_tokens: Mean length of answers whose length the request does not fix.
        api_key: Asked for on /v1; None: nobody is asked.
    """

    model: str = "toy"
    kind: str = "vllm"
    limits: Limits = field(default_factory=Limits)
    steps: StepTime = LinearSteps()
    speed: float = 1.0
    max_model_len: int = 8192
    mean_tokens: int = 64
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("kind of engine", self.kind, KINDS)
        if not self.speed > 0:
            raise InputError(f"speed must be above 0; it is {self.speed}")
        held = self.limits.num_blocks * self.limits.block_size
        if self.max_model_len > held:
            raise InputError(
                f"max_model_len must be at most what the KV cache holds, {held} tokens; it is {self.max_model_len}. "
                "Lower it, or give more num_blocks"
            )


def emulated(
    deployment: Deployment, *, kind: str = "vllm", speed: float = 1.0, model: str = ""
) -> EngineSpec:
    """One replica of a deployment as an engine: its cost tables, its memory, its limits.

    Where the rank is "priority", the latest arrival of the worst class is evicted, as vLLM does.

    Raises:
        InputError: The deployment is none that can be emulated; the message says why.
    """
    _require_emulable(deployment)
    limits = deployment.limits
    return EngineSpec(
        model=model or deployment.model.name,
        kind=kind,
        limits=Limits(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            deployment.kv.block_size,
            deployment.kv.num_blocks,
            limits.watermark,
            by_priority=deployment.scheduler.rank == "priority",
        ),
        steps=step_time(deployment.cost),
        speed=speed,
        max_model_len=deployment.max_model_len,
    )


def _require_emulable(deployment: Deployment) -> None:
    scheduler, limits = deployment.scheduler, deployment.limits
    wrong = {
        "pp = 1 (one pipeline stage)": deployment.parallel.pp != 1,
        'batching "unified"': scheduler.batching != "unified",
        'memory "paged_by_chunk"': scheduler.memory != "paged_by_chunk",
        'rank "fcfs_evicted_first" or "priority"': scheduler.rank not in ("fcfs_evicted_first", "priority"),
        'preempt "recompute"': scheduler.preempt != "recompute",
        'takeover "never"': scheduler.takeover != "never",
        "no bins": scheduler.binning is not None,
        "max_wait_s = inf": scheduler.max_wait_s != math.inf,
        "no prefix caching": limits.enable_prefix_caching,
        "no max_step_seqs": limits.max_step_seqs not in (None, limits.max_num_seqs),
    }
    if lacking := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise InputError(
            f"an emulated engine is like vllm_v1; this deployment must have {', '.join(lacking)}"
        )
