"""A schedule and what it would yield."""

from __future__ import annotations

from dataclasses import dataclass

SYSTEM_NAMES = {
    "fastertransformer": "FasterTransformer",
    "deepspeed-inference": "DeepSpeed-Inference",
    "orca": "Orca",
    "vllm": "vLLM v0",
    "sarathi": "Sarathi",
    "vllm-v1": "vLLM v1",
    "vllm-v1-disaggregated": "vLLM v1, disaggregated",
}
"""Other systems as people write them, by their name as a strategy."""


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule and what it would yield.

    Attributes:
        strategy: "rra", "waa-c", "waa-m", "static" (batches nobody enters or leaves), or one of ``SYSTEM_NAMES``.
        encode_batch: New requests of one encoding, B_E; of a static schedule its batch; of another system the
            sequences on a replica at most.
        decode_steps: Decode iterations between two encodings, N_D.
        micro_batches: Parts of a batch that are in the pipeline at a time.
        tp: Tensor-parallel degree of the groups.
        tp_groups: Groups of ``tp`` GPUs that are one stage each; every other GPU is a stage of its own.
        encode_gpus: GPUs that encode; RRA: all.
        throughput_rps: Requests that complete a second.
        latency_s: Of a request whose output is the quantile of the bound.
        latency_high_s: The same where batches' work is at the far end of its range.
        cycle_s: From one encoding to the next.
        encode_s: One batch's way through the encoding stages.
        decode_s: A decode iteration.
        decode_batch: Sequences that are decoded at a time, B_D.
        memory_share: What the fullest GPU needs over what it has.
        stages: Of another system: pipeline stages of a replica.
        replicas: Of it.
        chunk_tokens: Of another system: tokens of a step at most; 0: no limit.
        prefill_cut: Degree, stages and replicas of what only prefills; what else is said is then of what only decodes.
    """

    strategy: str
    encode_batch: int
    decode_steps: int
    micro_batches: int
    tp: int
    tp_groups: int
    encode_gpus: int
    throughput_rps: float
    latency_s: float
    latency_high_s: float
    cycle_s: float
    encode_s: float
    decode_s: float
    decode_batch: float
    memory_share: float
    stages: int = 0
    replicas: int = 1
    chunk_tokens: int = 0
    prefill_cut: tuple[int, int, int] | None = None

    @property
    def words(self) -> str:
        """The schedule as people name it: "RRA, B_E = 52, N_D = 13, 1 x TP 4"."""
        if self.strategy in SYSTEM_NAMES:
            return self._system_words
        parts = [self.strategy.upper(), f"B_E = {self.encode_batch}"]
        if self.strategy == "static":
            parts = ["static", f"batch {self.encode_batch}"]
        if self.strategy == "rra":
            parts.append(f"N_D = {self.decode_steps}")
        if self.strategy.startswith("waa"):
            parts.append(f"B_m = {self.micro_batches}")
            parts.append(f"{self.encode_gpus} {'GPU encodes' if self.encode_gpus == 1 else 'GPUs encode'}")
        if self.tp_groups:
            parts.append(f"{self.tp_groups} x TP {self.tp}")
        return ", ".join(parts)

    @property
    def _system_words(self) -> str:
        """As in "vLLM v1, batch 64, steps of 2,048 tokens, 2 replicas of 2 stages of TP 4"."""
        parts = [SYSTEM_NAMES[self.strategy], f"batch {self.encode_batch:,}"]
        if self.chunk_tokens:
            parts.append(f"steps of {self.chunk_tokens:,} tokens")
        if self.micro_batches > self.stages:
            parts.append(f"prompts in {self.micro_batches} parts")
        if self.prefill_cut is None:
            return ", ".join([*parts, _cut_words(self.tp, self.stages, self.replicas)])
        parts.append(f"prompts on {_cut_words(*self.prefill_cut)}")
        return ", ".join([*parts, f"decodes on {_cut_words(self.tp, self.stages, self.replicas)}"])

    @property
    def family(self) -> tuple[str, int, int]:
        """What cannot be changed without loading weights anew, but for WAA's split: strategy, degree, groups."""
        return self.strategy, self.tp if self.tp_groups else 1, self.tp_groups


def _cut_words(tp: int, stages: int, replicas: int) -> str:
    """As in "2 replicas of 2 stages of TP 4"."""
    parts = [f"{many} {what}" for many, what in ((replicas, "replicas"), (stages, "stages")) if many > 1]
    return " of ".join([*parts, f"TP {tp}"] if tp > 1 or stages == 1 else parts)
