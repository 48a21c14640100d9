"""The page's section on what ran: facts in common, facts that differ, scenarios."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from lengthwise.report._marks import scrolling, swatch, variant_heads
from lengthwise.report._numbers import UNKNOWN
from lengthwise.report.json_file import deployment_facts
from lengthwise.report.result import Result

FACTS = {
    "model": "Model",
    "gpu": "GPU",
    "gpus": "GPUs",
    "tp": "Tensor parallel",
    "pp": "Pipeline stages",
    "replicas": "Replicas",
    "rank": "Rank",
    "leave": "Leaves first",
    "batching": "Batching",
    "memory": "Memory",
    "preempt": "Preemption by",
    "router": "Router",
    "takeover": "Takeover",
    "binning": "Bins",
    "max_wait_s": "Longest wait, s",
    "batch_wait_s": "Longest wait in a bin, s",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "kv_blocks": "KV blocks",
    "block_size_tokens": "Block size",
    "price_per_hour_usd": "$ an hour",
    "cost_source": "Cost model",
}


def what_ran(results: Sequence[Result]) -> str:
    """HTML: what all variants have in common, what differs side by side, and the scenarios."""
    facts = [{} if r.deployment is None else deployment_facts(r.deployment) for r in results]
    common: list[tuple[str, list[Any]]] = []
    differing: list[tuple[str, list[Any]]] = []
    labels = {name: name for r in results for name in r.engine} | (FACTS if any(facts) else {})
    for key, label in labels.items():
        values = [(f or r.engine).get(key, UNKNOWN) for f, r in zip(facts, results, strict=True)]
        (common if len(set(values)) == 1 else differing).append((label, values))
    return _common(common) + _differing(differing, results) + _scenarios(results)


def _common(facts: Sequence[tuple[str, list[Any]]]) -> str:
    items = "".join(f"<div><dt>{label}</dt><dd>{_fact(values[0])}</dd></div>" for label, values in facts)
    return f'<dl class="common">{items}</dl>'


def _differing(facts: Sequence[tuple[str, list[Any]]], results: Sequence[Result]) -> str:
    if not facts:
        return ""
    lines = "".join(
        f'<tr><th scope="row">{label}</th>{"".join(f"<td>{_fact(v)}</td>" for v in values)}</tr>'
        for label, values in facts
    )
    return scrolling("What differs", f"{variant_heads(results)}<tbody>{lines}</tbody>", "ran")


def _fact(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value)) or UNKNOWN


def _scenarios(results: Sequence[Result]) -> str:
    return "".join(
        f"<details><summary>{swatch(i)}Scenario of {escape(r.name)}</summary>"
        f'<pre tabindex="0">{escape(r.scenario_text)}</pre></details>'
        for i, r in enumerate(results)
        if r.scenario_text
    )
