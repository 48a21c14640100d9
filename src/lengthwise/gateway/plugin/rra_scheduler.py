"""vLLM's own scheduler, held to the phases of an RRA schedule (ExeGPT, section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from lengthwise.gateway.plugin.check import doubts_of_attributes, doubts_of_classes
from lengthwise.gateway.plugin.making import Rules
from lengthwise.gateway.plugin.phased import Phased, Rra
from lengthwise.gateway.plugin.rra_settings import RraSettings, rra_settings_of

METHODS: dict[str, tuple[str, ...]] = {"schedule": (), "update_from_output": (), "shutdown": ()}
ATTRIBUTES = {
    "running": list,
    "max_num_active_reqs": int,
    "num_waiting_for_streaming_input": int,
    "waiting": object,
    "kv_holding_waiting": object,
    "current_step": int,
    "pause_state": int,
}
REQUEST = frozenset(
    {"num_prompt_tokens", "max_tokens", "num_computed_tokens", "num_output_placeholders"}
    | {"is_prefill_chunk", "next_decode_eligible_step"}
)
_DUE = "next_decode_eligible_step"


class RraScheduler:
    """Makes the scheduler that vLLM would make itself, held to phases.

    A phase encodes ``encode_batch`` requests (whole prompts, over as many steps as the step's tokens make it, while
    decodes rest), then decodes ``decode_steps`` times and lets nobody in. When nobody decodes the next phase begins at
    once. Where anything is in doubt it is vLLM's own scheduler and nothing else, and the log says why.
    """

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """A scheduler."""
        return _PHASED.made(cls.__name__, args, named)


def _doubts(stock: type, config: Any) -> Iterator[str]:
    """Of engines whose steps are no phases, or of which vLLM does not pass decodes over."""
    yield from doubts_of_classes(stock, import_module("vllm.v1.request").Request, METHODS, REQUEST)
    schedule = getattr(getattr(stock, "schedule", None), "__code__", None)
    if schedule is None or not {_DUE, "max_num_active_reqs"} <= set(schedule.co_names):
        yield "its schedule() does not look at when a decode is due and how many may run"
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline stages have several batches under way; phases are of one"
    if parallel.data_parallel_size > 1:
        yield "data-parallel ranks wait for each other; run an engine each"
    for name, what in (
        ("speculative_config", "speculation makes several tokens a step"),
        ("kv_transfer_config", "a KV connector admits on its own"),
    ):
        if getattr(config, name) is not None:
            yield what
    if config.model_config.runner_type != "generate":
        yield "it does not decode"
    if config.model_config.is_encoder_decoder:
        yield "an encoder-decoder's prompts are computed otherwise"


def _doubts_made(scheduler: Any) -> Iterator[str]:
    yield from doubts_of_attributes(scheduler, ATTRIBUTES)


def _says(settings: RraSettings) -> str:
    return f"holds this engine to {settings.policy().name}"


_PHASED = Rules(Phased, rra_settings_of, _doubts, _doubts_made, Rra, _says, "schedule")
