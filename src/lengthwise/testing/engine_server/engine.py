"""Settings of an emulated engine: model name, kind of API, limits and step times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lengthwise.engine.continuous_batching import Limits
from lengthwise.engine.step_time import StepTime, step_time
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, UnknownNameError

KINDS = ("vllm", "sglang", "llama.cpp", "openai")


@dataclass(frozen=True)
class LinearSteps:
    """Step time that is linear in decodes, prompt tokens and the KV tokens that decodes read."""

    fixed_s: float = 0.004
    decode_s: float = 0.0002
    prompt_token_s: float = 0.00002
    kv_token_s: float = 0.0

    def __call__(self, decodes: int, kv_tokens: int, prompts: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of one step. ``prompts`` has pairs of tokens to compute and tokens computed before."""
        tokens = sum(chunk for chunk, _ in prompts)
        return self.fixed_s + self.decode_s * decodes + self.prompt_token_s * tokens + self.kv_token_s * kv_tokens


@dataclass(frozen=True)
class EngineSpec:
    """Settings of one emulated engine."""

    model: str = "toy"  # model name; it also seeds the generated text
    kind: str = "vllm"  # one of KINDS: selects routes, metrics and the sign of priorities
    limits: Limits = field(default_factory=Limits)
    steps: StepTime = LinearSteps()
    speed: float = 1.0  # engine seconds per real second
    max_model_len: int = 8192  # maximum prompt and output tokens together
    mean_tokens: int = 64  # mean output length if the request does not fix it
    api_key: str | None = None  # required on /v1; None: no authentication

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("kind of engine", self.kind, KINDS)
        if not self.speed > 0:
            raise InputError(f"speed must be above 0; it is {self.speed}")
        kv_tokens = self.limits.num_blocks * self.limits.block_size
        if self.max_model_len > kv_tokens:
            rule = f"max_model_len must be at most the KV cache size, {kv_tokens} tokens"
            raise InputError(f"{rule}; it is {self.max_model_len}. Lower it, or give more num_blocks")


def emulated(deployment: Deployment, *, speed: float = 1.0, model: str = "") -> EngineSpec:
    """Return settings that emulate one replica of a deployment. Raises InputError for unsupported settings.

    With rank "priority", the latest arrival of the worst class is preempted, as in vLLM.
    """
    scheduler, limits = deployment.scheduler, deployment.limits
    requirements = {
        "pp = 1 (one pipeline stage)": deployment.parallel.pp == 1,
        'batching "unified"': scheduler.batching == "unified",
        'memory "paged_by_chunk"': scheduler.memory == "paged_by_chunk",
        'rank "fcfs_preempted_first" or "priority"': scheduler.rank in ("fcfs_preempted_first", "priority"),
        'preemption_mode "recompute"': scheduler.preemption_mode == "recompute",
        'preemption "never"': scheduler.preemption == "never",
        "no bins": scheduler.binning is None,
        "async_scheduling = false": not scheduler.async_scheduling,
        "long_prefill_token_threshold = 0": not scheduler.long_prefill_token_threshold,
        "reserve = false": not scheduler.reserve,
        "max_wait_s = inf": scheduler.max_wait_s == math.inf,
        "no prefix caching": not limits.enable_prefix_caching,
        "no max_step_seqs": limits.max_step_seqs in (None, limits.max_num_seqs),
    }
    if missing := [name for name, is_met in requirements.items() if not is_met]:
        raise InputError(f"an emulated engine is like vllm_v1; this deployment must have {', '.join(missing)}")
    parts = Limits.of(deployment), step_time(deployment.cost), speed, deployment.max_model_len
    return EngineSpec(model or deployment.model.name, "vllm", *parts)
