"""A Hugging Face ``config.json`` read by keys, under whichever name a model family gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lengthwise.schema.errors import InputError

_TEXT_PARTS = ("text_config", "language_config", "llm_config")

_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    # transformers writes only what differs from the class, so these may be absent from a file.
    "gemma": {"head_dim": 256},
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
    },
    "qwen": {"hidden_act": "silu"},
}

_UNTIED_BY_CLASS = (
    *("codellama", "deepseek_v2", "deepseek_v3", "gpt_neox", "gptj", "internlm", "internlm2", "llama"),
    *("mistral", "mixtral", "olmo", "phi", "phi3", "qwen", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "stablelm",
)
"""Types whose class leaves head and embedding apart where a file does not say."""


class ConfigKeys:
    """Answers what a config says; what it lacks is gathered and reported once by ``check``.

    Args:
        config: The parsed ``config.json``; the text part of a multimodal one is used.
        where: What errors call it: its file or its name.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        parts = [config[key] for key in _TEXT_PARTS if isinstance(config.get(key), Mapping)]
        table = {**config, **(parts[0] if parts else {})}
        self.model_type = str(table.get("model_type", ""))
        self._table: dict[str, Any] = {**_CLASS_DEFAULTS.get(self.model_type, {}), **table}
        self._missing: list[str] = []

    def has(self, *names: str) -> bool:
        """Whether one of these keys is there, even as null."""
        return any(name in self._table for name in names)

    def find(self, *names: str, default: Any = None) -> Any:
        """The first of these keys that holds something, else ``default``."""
        values = (self._table[name] for name in names if self._table.get(name) is not None)
        return next(values, default)

    def count(self, *names: str, default: int = 0) -> int:
        """The first of these keys as a whole number, else ``default``.

        Raises:
            InputError: It holds something else.
        """
        value = self.find(*names, default=default)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < 0:
            raise InputError(f"{self.where}: {self._first(names)} must be a whole number; it is {value!r}")
        return int(value)

    def listed(self, *names: str) -> list[Any]:
        """The first of these keys as a list, else an empty one.

        Raises:
            InputError: It holds something else.
        """
        value = self.find(*names, default=[])
        if not isinstance(value, list):
            raise InputError(f"{self.where}: {self._first(names)} must be a list; it is {value!r}")
        return value

    def need(self, what: str, *names: str) -> int:
        """Like ``count``, of at least 1; when absent 1, which ``check`` reports as missing."""
        value = self.count(*names)
        if not value:
            self._missing.append(f"{what} (looked for {', '.join(names)})")
        return value or 1

    def is_tied(self) -> bool:
        """Whether head and embedding share weights; what transformers does when the key is absent."""
        return bool(self.find("tie_word_embeddings", default=self.model_type not in _UNTIED_BY_CLASS))

    def check(self) -> None:
        """Does nothing when all that was needed was there.

        Raises:
            InputError: Something was missing; the message names every alternative looked for.
        """
        if self._missing:
            raise InputError(
                f"{self.where} must give the shapes of a model; it lacks {'; '.join(self._missing)}. "
                f"Its keys are {', '.join(sorted(self._table)) or 'none'}",
            )

    def _first(self, names: tuple[str, ...]) -> str:
        return next(name for name in names if self._table.get(name) is not None)
