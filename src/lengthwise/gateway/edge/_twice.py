"""Fields that stand twice in a body, or in another spelling: who reads it later might take the other one.

The body goes on as it came, and JSON does not say which of two equal names counts. So no field that anybody
here acts on may stand twice, spelt with escapes or in other letters (some servers do not mind the case).
Fields that only the engine reads are its own business.
"""

from __future__ import annotations

import msgspec

from lengthwise.gateway.edge.faults import bad, shown

FIELDS = (
    "model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "max_tokens",
    "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs",
    "prompt_logprobs", "user", "prompt_cache_key", "priority", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "response_format", "tools",
    "tool_choice", "functions", "function_call", "echo", "suffix", "ignore_eos", "structured_outputs",
    "use_beam_search", "return_token_ids", "continue_final_message", "add_generation_prompt",
    "kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "data_parallel_rank", "custom_logit_processor", "vllm_xargs",
)  # fmt: skip
_KNOWN = frozenset(FIELDS)
MOST = 256
"""Fields at the top of a body; all that engines know of are fewer than 100."""


class _Name:
    """A field's name, one object for each time that it stands there."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_NAMES = dict[_Name, msgspec.Raw]
_OF_FEW: msgspec.json.Decoder[dict[_Name, msgspec.Raw]]
_OF_FEW = msgspec.json.Decoder(_NAMES, dec_hook=lambda _, text: _Name(text))
"""For a body that cannot have too many: to make a decoder for each request would take 1.5 us."""


def _names(body: bytes) -> dict[_Name, msgspec.Raw]:
    """All names at the top; the decoder stops at the first one too many, so that no more are built than may be."""
    if body.count(b":") <= MOST:
        return _OF_FEW.decode(body)
    left = MOST

    def name(_: type, text: str) -> _Name:
        nonlocal left
        left -= 1
        if left < 0:
            raise bad(None, f"The body may have {MOST} fields.", "too_many_fields")
        return _Name(text)

    return msgspec.json.Decoder(_NAMES, dec_hook=name).decode(body)


def check_once(body: bytes) -> None:
    """Raises a Fault if a field stands twice at the top of valid JSON, or strangely spelt, or they are too many."""
    seen = set()
    for name in _names(body):
        field = name.text.casefold()
        if field not in _KNOWN:
            continue
        if name.text != field:
            raise bad(
                field, f"The field must be spelt {field!r}; it is {shown(name.text)}.", "misspelt_field"
            )
        if field in seen:
            raise bad(
                field, f"The field {field!r} must stand once in the body; it stands twice.", "duplicate_field"
            )
        seen.add(field)
