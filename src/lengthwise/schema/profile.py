"""Defines profiles: measured operators of a device, one row for each point, with the spread over its repetitions.

A row belongs to an operator of a model's shard (``tp`` >= 1; then ``ProfileFacts.model`` names the model), or to a
kernel without a model (``tp`` 0), which its shape columns describe. Columns that do not apply to a row are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import ProfileError


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


_OPERATORS = {
    "layer": "input norm, post-attention norm, residual add, norms, qkv projection, latent projection, "
    "query projection, kv up-projection, rope, kv write, output projection, mlp up, activation, mlp down, router, "
    "experts up, expert activation, experts down, fused moe, moe block, shared mlp up, shared activation, "
    "shared mlp down",
    "comm": "all-reduce",
    "embedding": "embedding",
    "send": "send",
    "head": "final norm, lm head, sampler, logits gather",
    "host": "host",
    "prefill": "prefill attention, prefill window attention",
    "decode": "decode attention, decode window attention",
    "mixed": "mixed attention",
    "gemm": "gemm",
}
OPERATOR_PARTS = {name: part for part, names in _OPERATORS.items() for name in _names(names)}
"""The part of the cost tables to which each operator belongs. Its seconds count once per layer for "layer", "prefill"
and "decode", twice per layer for an all-reduce, and once per step for other operators. "mixed attention" (prompts and
decodes in one kernel) and "gemm" (of no model) belong to no part of the tables; an estimator may use them."""

_UP_AND_DOWN = ("mlp up", "mlp down", "shared mlp up", "shared mlp down")
PRODUCTS = frozenset({name for name in OPERATOR_PARTS if name.endswith("projection")} | {*_UP_AND_DOWN, "lm head"})
"""Operators that multiply all tokens of a step by one matrix."""

WHOLE_COLUMNS = _names(
    "tp, tokens, seqs, chunk, context, kv_tokens, n, k, heads, kv_heads, head_dim, window, experts, topk, gpus, bytes, "
    "repeats"
)
"""``tokens``: rows through the operator (for the head: sequences; for the host: sequences of the step).
Prefill attention: ``seqs`` prompts of ``chunk`` new tokens after ``context`` cached ones each. Decode
attention: ``seqs`` sequences with ``kv_tokens`` cached tokens in all. Mixed attention: prompts' ``chunk``,
``context`` and decodes' ``seqs``, ``kv_tokens``. GEMM: [tokens, k] by [k, n]. Fused MoE (kernels, not shards): all
``experts``, ``topk``, ``n`` the experts' width, ``k`` the hidden size. MoE block (router and experts of a shard):
``experts`` are those that the tokens activate. Collectives and send: ``bytes`` of the message over ``gpus``."""

REAL_COLUMNS = ("skew", "seconds", "spread_s")
"""``skew``: longest over mean context of the sequences (1: all equal; 0: unknown). ``seconds``: the median
over ``repeats``; ``spread_s``: the distance between their quartiles (NaN: unknown)."""

TEXT_COLUMNS = ("operator", "dtype", "kv_dtype", "backend")
"""``backend``: the kernel's or library's name if known, such as an attention backend or "nccl"."""

MADE_UP = "made_up"
"""Key of ``ProfileFacts.machine``. Its value {operator: [TP degree, ...]} marks rows that are not measurements."""

COLUMNS = (*TEXT_COLUMNS, *WHOLE_COLUMNS, *REAL_COLUMNS)


@dataclass(frozen=True)
class ProfileFacts:
    """Origin of a profile."""

    name: str
    source: str  # the program that measured: "lengthwise", "vidur", "llmservingsim v0", "llmservingsim v1", ...
    gpu: str  # catalog name of the device, or its name in the source
    model: str = ""
    engine: str = ""  # origin of the kernels, such as "vLLM 0.19.0" or "torch 2.13.0"
    license: str = ""
    measured: str = ""  # date or dates (ISO), or ""
    # JSON-able facts: processor, driver, versions, threads; MADE_UP, if some rows are not measured.
    machine: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for example on skipped points and converted units


@dataclass(frozen=True)
class Profile:
    """Measured points as columns of one length. Missing columns are filled with 0, "" or (``spread_s``) NaN.

    Raises:
        ProfileError: A column is unknown, has another length, or an invalid value.
    """

    metadata: ProfileFacts
    columns: Mapping[str, npt.NDArray[Any]]

    def __post_init__(self) -> None:
        unknown = set(self.columns) - set(COLUMNS)
        if unknown or not {"operator", "seconds"} <= set(self.columns):
            raise ProfileError(
                f"a profile's columns must be of {', '.join(COLUMNS)}, with operator and seconds; "
                f"there are {', '.join(sorted(self.columns)) or 'none'}"
            )
        n = len(self.columns["seconds"])
        object.__setattr__(self, "columns", {name: self._column(name, n) for name in COLUMNS})
        self._check()

    def _column(self, name: str, n: int) -> npt.NDArray[Any]:
        kind: Any = np.str_ if name in TEXT_COLUMNS else np.int64 if name in WHOLE_COLUMNS else np.float64
        if name not in self.columns:
            blank = "" if kind is np.str_ else np.nan if name == "spread_s" else 0
            return np.full(n, blank, dtype=kind)
        values = np.asarray(self.columns[name]).astype(kind)
        if values.shape != (n,):
            raise ProfileError(f"{name} must have one value a row ({n}); it has shape {values.shape}")
        return values

    def _check(self) -> None:
        operators = np.unique(self.columns["operator"])
        unknown = sorted(set(operators.tolist()) - set(OPERATOR_PARTS))
        if unknown:
            raise ProfileError(f"operators must be of {', '.join(OPERATOR_PARTS)}; there are {', '.join(unknown)}")
        seconds = self.columns["seconds"]
        bad = np.flatnonzero(~np.isfinite(seconds) | (seconds < 0))
        if len(bad):
            raise ProfileError(
                f"seconds must be finite and not negative; row {bad[0]} ({self.columns['operator'][bad[0]]}) "
                f"has {seconds[bad[0]]}"
            )
        for name in WHOLE_COLUMNS:
            bad = np.flatnonzero(self.columns[name] < 0)
            if len(bad):
                raise ProfileError(f"{name} must not be negative; row {bad[0]} has {self.columns[name][bad[0]]}")

    def __len__(self) -> int:
        return len(self.columns["seconds"])

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        return self.columns[column]

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the operators that have rows, in the order of OPERATOR_PARTS."""
        present = set(self.columns["operator"].tolist())
        return tuple(name for name in OPERATOR_PARTS if name in present)

    @property
    def tensor_parallel(self) -> tuple[int, ...]:
        """Return the TP degrees that have rows of a model's shard, ascending."""
        return tuple(int(tp) for tp in np.unique(self.columns["tp"]) if tp > 0)

    def where(self, mask: npt.NDArray[np.bool_]) -> Profile:
        """Return a profile of the rows where a mask [n] is true."""
        return replace(self, columns={name: column[mask] for name, column in self.columns.items()})

    def made_up(self, operator: str) -> tuple[int, ...]:
        """Return the TP degrees, ascending, at which the rows of an operator are estimates, not measurements."""
        unmeasured = self.metadata.machine.get(MADE_UP, {}).get(operator, ())
        present = set(self.of(operator)["tp"].tolist()) if unmeasured else set()
        return tuple(sorted(present & set(unmeasured)))

    def of(self, operator: str, tp: int | None = None) -> Profile:
        """Return a profile of the rows of one operator, at one TP degree if ``tp`` is given."""
        mask = self.columns["operator"] == operator
        if tp is not None:
            mask &= self.columns["tp"] == tp
        return self.where(mask)
