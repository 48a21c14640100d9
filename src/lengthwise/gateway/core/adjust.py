"""How many new requests an encoding takes: the batching of the simulator's phases, asked request by request."""

from __future__ import annotations

from lengthwise.gateway.phasing import Phases
from lengthwise.policy.contracts import BATCHING_ARGUMENTS, Policy
from lengthwise.policy.named import resolve

_NOTHING = dict.fromkeys(BATCHING_ARGUMENTS, 0)


class Sizing:
    """The batch of an encoding: B_E, or with a threshold what keeps work even (ExeGPT, section 5.2).

    The same policy decides in the simulator (``rra`` of the axis "batching"), here with one engine as one stage.
    """

    def __init__(self, phases: Phases) -> None:
        self._policy = batching(phases)
        values = self._policy.all_parameters
        self._fixed = {**_NOTHING, "stages": 1, **{f"parameter_{n}": value for n, value in enumerate(values)}}
        self._one_by_one = self._policy.uses("step_prompts")

    def takes(self, taken: int, taken_tokens: int, next_tokens: int, *, waiting: int, decodes: int) -> bool:
        """Whether the encoding takes one more.

        Args:
            taken: Requests that it has.
            taken_tokens: Prompt tokens of these.
            next_tokens: Prompt tokens of the one that would be next.
            waiting: Requests that wait, that one among them.
            decodes: Requests that were there before the encoding.
        """
        facts = self._fixed | {
            "decodes": decodes,
            "resident": decodes,
            "waiting": waiting if self._one_by_one else waiting + taken,
            "step_prompts": taken,
            "step_tokens": taken_tokens,
            "next_tokens": next_tokens,
        }
        most = self._policy.function(**{name: facts[name] for name in self._policy.arguments})[0]
        return bool(most > taken)


def batching(phases: Phases) -> Policy:
    """The simulator's policy that batches as the schedule says."""
    text = f"rra(encode_batch={phases.encode_batch}, decode_steps={phases.decode_steps}, micro_batches=1"
    if phases.threshold is not None:
        assert phases.mean_prompt_tokens is not None
        assert phases.decode_batch is not None
        prompts = max(1, round(phases.encode_batch * phases.mean_prompt_tokens))
        decodes = max(1, round(phases.decode_batch))
        text += f", threshold={phases.threshold!r}, prompt_tokens={prompts}, decode_batch={decodes}"
    return resolve("batching", f"{text})")
