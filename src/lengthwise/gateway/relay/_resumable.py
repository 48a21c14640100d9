"""Whether a cut can change a request's answer.

A request that was cut goes on as a new one: its prompt and the tokens so far are the new prompt. The model
sees the same tokens in the same places, so the next token has the same distribution; with a temperature of 0
it is the same token (as far as the engine's arithmetic is: batches differ). What counts on tokens being
*output*, or on one run of the engine, does not survive: such requests are never cut, and not failed over once
something of them has been sent.

What a request leaves out, its engine may fill in: vLLM takes penalties and a longest output from the model's
``generation_config.json`` (or ``--override-generation-config``), and tells nobody but who asks its development mode or
its ``/render`` endpoints, which are off unless asked for. Of what it takes (vLLM 0.32: repetition, presence and
frequency penalty, temperature, top_k, top_p, min_p, max_new_tokens):

- temperature, top_k, top_p, min_p shape the next token alone: the continuation leaves them out as well, and its
  distribution is the same;
- presence and frequency penalties count what is output, and begin anew;
- a repetition penalty counts prompt and output alike in vLLM, so that a cut does not change it; other engines
  count the output alone;
- a longest output would begin anew with the continuation.

So where nobody knows an engine's defaults, only a request that leaves none of these open (``left_open``) is cut
there. It may still fail over: the alternative is a broken stream. One thing stays unseen: an engine that caps the
outputs of all requests, whatever they ask for (an overriding max_new_tokens), caps each run of a cut one by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Fields = Mapping[str, Any]

CARRIED = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop_token_ids", "skip_special_tokens",
        "spaces_between_special_tokens", "logit_bias", "allowed_token_ids", "priority", "cache_salt", "user",
        "vllm_xargs", "seed", "stop", "logprobs", "n", "best_of", "stream_interval",
    }
)  # fmt: skip
"""What goes on as it is: it holds of the next token alone (or was found to say nothing)."""
READ = frozenset(
    {
        "model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens",
        "min_tokens", "return_token_ids",
    }
)  # fmt: skip
"""What is told anew."""
OF_THE_PROMPT = frozenset(
    {
        "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
        "add_special_tokens", "documents", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "request_id", "parallel_tool_calls", "include_reasoning",
    }
)  # fmt: skip
"""What is in the prompt's token ids already, or is nothing to the engine."""


def _penalty(neutral: float) -> Callable[[Any], bool]:
    return lambda value: value is None or value == neutral


def _empty(value: Any) -> bool:
    return not value


def _no_logprobs(value: Any) -> bool:
    return value is None or value is False


def _one(value: Any) -> bool:
    return value is None or value == 1


def _plain_format(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and value.get("type") == "text")


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "presence_penalty": (_penalty(0), "it counts the tokens that are output, not prompt"),
    "frequency_penalty": (_penalty(0), "it counts the tokens that are output, not prompt"),
    "repetition_penalty": (_penalty(1), "engines differ in whether it counts the prompt"),
    "length_penalty": (_one, "it belongs to beam search"),
    "use_beam_search": (_empty, "beams end with the run"),
    "n": (_one, "several outputs share a run"),
    "best_of": (_one, "several outputs share a run"),
    "stop": (_empty, "a stop string may begin before the cut and end behind it"),
    "include_stop_str_in_output": (_empty, "a stop string may begin before the cut and end behind it"),
    "bad_words": (_empty, "a word may begin before the cut and end behind it"),
    "logprobs": (_no_logprobs, "offsets begin anew"),
    "top_logprobs": (_empty, "offsets begin anew"),
    "prompt_logprobs": (_no_logprobs, "the prompt is not the same"),
    "echo": (_empty, "the prompt is not the same"),
    "suffix": (_empty, "the model sees what comes behind"),
    "response_format": (_plain_format, "the state of a grammar is lost"),
    "structured_outputs": (_empty, "the state of a grammar is lost"),
    "guided_json": (_empty, "the state of a grammar is lost"),
    "guided_regex": (_empty, "the state of a grammar is lost"),
    "guided_choice": (_empty, "the state of a grammar is lost"),
    "guided_grammar": (_empty, "the state of a grammar is lost"),
    "tools": (_empty, "the parser of tool calls reads one run"),
    "tool_choice": (lambda value: value in (None, "none"), "the parser of tool calls reads one run"),
    "functions": (_empty, "the parser of tool calls reads one run"),
    "function_call": (_empty, "the parser of tool calls reads one run"),
    "modalities": (lambda value: value in (None, ["text"]), "only text is continued"),
    "audio": (_empty, "only text is continued"),
    "mm_processor_kwargs": (_empty, "only text is continued"),
    "prompt_embeds": (_empty, "only tokens are continued"),
    "truncate_prompt_tokens": (_empty, "it would cut the tokens so far"),
    "return_tokens_as_token_ids": (_empty, "it comes with logprobs"),
    "detokenize": (lambda value: value in (None, True), "without text nobody knows what was sent"),
}


def obstacle(fields: Fields) -> str | None:
    """Why a cut could change the answer to these fields; None where it cannot."""
    for name, value in fields.items():
        rule = RULES.get(name)
        if rule is not None:
            if not rule[0](value):
                return f"{name}: {rule[1]}"
        elif name not in CARRIED and name not in READ and name not in OF_THE_PROMPT and value is not None:
            return f"{name}: nobody knows what a cut does to it"
    if fields.get("seed") is not None and fields.get("temperature") != 0:
        return "seed: the engine's random numbers begin anew"
    return _of_prompt(fields)


OPEN = ("presence_penalty", "frequency_penalty", "repetition_penalty")
SAME_IN_VLLM = frozenset({"repetition_penalty"})
"""It counts prompt and output there: where one ends and the other begins makes no difference."""


def left_open(fields: Fields) -> frozenset[str]:
    """What an engine might fill in that a cut would change: the request does not say it."""
    found = {name for name in OPEN if fields.get(name) is None}
    if fields.get("max_tokens") is None and fields.get("max_completion_tokens") is None:
        found.add("max_tokens")
    return frozenset(found)


def _of_prompt(fields: Fields) -> str | None:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and (not prompt or not all(type(one) is int for one in prompt)):
        return "prompt: several prompts share a request"
    messages = fields.get("messages") or ()
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and not all(_is_text(part) for part in content):
            return "messages: only text is continued"
    return None


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") == "text")
