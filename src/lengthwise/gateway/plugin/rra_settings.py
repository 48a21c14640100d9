"""Which schedule an engine keeps: ``--additional-config '{"lengthwise": {"encode_batch": 8, "decode_steps": 16}}'``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from lengthwise.gateway.plugin.settings import table_of
from lengthwise.policy.contracts import Policy
from lengthwise.policy.families import rra
from lengthwise.schema.errors import InputError


@dataclass(frozen=True)
class RraSettings:
    """An RRA schedule (ExeGPT).

    Attributes:
        encode_batch: New requests of one encoding, B_E.
        decode_steps: Decode iterations between two encodings, N_D.
        threshold: Share by which an encoding's prompt tokens, and the decode batch, may leave their means:
            encodings are then resized. None: they are not.
        prompt_tokens: Mean prompt tokens of one encoding, all of its requests together; for ``threshold``.
        decode_batch: Mean decode batch, B_D; for ``threshold``.
        record: File to which a JSON line a phase is added; "": none.
        trust_version: Hold engines of versions, too, on which this was never run.
    """

    encode_batch: int
    decode_steps: int
    threshold: float | None = None
    prompt_tokens: int = 0
    decode_batch: int = 0
    record: str = ""
    trust_version: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            value, whole = getattr(self, one.name), one.type == "int"
            if whole and (not isinstance(value, int) or isinstance(value, bool)):
                raise InputError(f"lengthwise: {one.name} must be a whole number; it is {value!r}")
        if not isinstance(self.record, str) or not isinstance(self.trust_version, bool):
            raise InputError(
                "lengthwise: record must be a file's name and trust_version true or false; they are "
                f"{self.record!r} and {self.trust_version!r}"
            )
        self.policy()

    def policy(self) -> Policy:
        """The batching of the simulator that this is.

        Raises:
            InputError: A number is out of its range.
        """
        return rra(
            self.encode_batch,
            self.decode_steps,
            threshold=self.threshold,
            prompt_tokens=self.prompt_tokens,
            decode_batch=self.decode_batch,
        )


def rra_settings_of(additional_config: Any) -> RraSettings:
    """The schedule in vLLM's ``additional_config``.

    Raises:
        InputError: There is none, or it cannot be used.
    """
    told = table_of(additional_config, RraSettings)
    missing = [name for name in ("encode_batch", "decode_steps") if name not in told]
    if missing:
        raise InputError(
            f"lengthwise: a schedule must have {' and '.join(missing)}; give it with "
            '--additional-config \'{"lengthwise": {"encode_batch": 8, "decode_steps": 16}}\''
        )
    return RraSettings(**told)
