"""``lengthwise explain``: what fits, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.options import CostSource
from lengthwise.cli.tables import duration, fit_note, gib, print_facts, print_table
from lengthwise.schema.cost_tables import CostTables
from lengthwise.usecases.explain import Explanation, Fit, Step, explain
from lengthwise.usecases.variants import Variant

EXAMPLES = """\b
Example:
  lengthwise explain examples/chat-70b.toml --set deployment.tp=2
"""


def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A .toml or .yaml file.")],
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: deployment.tp=2; repeatable."),
    ] = None,
    cost: CostSource = None,
) -> None:
    """Show what fits, what a step costs by operator, and what binds; nothing is simulated."""
    from lengthwise import config
    from lengthwise.cli import options
    from lengthwise.usecases import variants

    asked = config.load(scenario, options.overrides(set_, cost))
    options.tell(asked.notes)
    show_all(variants.build(asked))


_BOUND = {"compute": "c", "memory": "m", "network": "n", "latency": "l"}


def show_all(variants: list[Variant]) -> None:
    """Prints a page a variant; one whose scheduler changes nothing on its page is told in a line."""
    shown: list[tuple[Variant, Explanation]] = []
    for variant in variants:
        found = explain(variant)
        alike = next((one for one in shown if _page_of(*one) == _page_of(variant, found)), None)
        if shown:
            typer.echo()
        if alike is None:
            show(variant, found)
            shown.append((variant, found))
        else:
            print_facts(variant.name, [("scheduler", _scheduler(variant)), ("the rest", f"as {alike[0].name}")])


def show(variant: Variant, found: Explanation) -> None:
    """Prints what fits, what a step costs, and what binds."""
    print_facts(variant.name, _deployment_facts(variant))
    typer.echo()
    print_table(("the fullest GPU of a replica", "size", "of what"), _memory_rows(variant))
    typer.echo()
    print_table(("requests that hold", "fit at once", "limited by"), [_fit_row(variant, f) for f in found.fits])
    if found.by_prediction:
        typer.echo("The memory policy looks at predictions: with them it may let in fewer or more.")
    if variant.deployment.cost.fit:
        typer.echo()
        print_table(("fit of the profile, error", "median", "p95"), _fit_rows(variant.deployment.cost))
    typer.echo(
        f"\nOne step of a replica; a sequence that decodes has {found.context_tokens:,} tokens cached."
        "\nBound by: c compute, m memory, n network, l latency."
    )
    print_table(("operator", *(step.name for step in found.steps)), _operator_rows(found.steps), wraps=("operator",))


def _page_of(variant: Variant, found: Explanation) -> tuple[object, ...]:
    """What the page follows from: of the scheduler, what its memory policy lets in."""
    whole = variant.scenario
    return whole.deployment, whole.engine, whole.workload, whole.predictor, found.fits, found.by_prediction


def _scheduler(variant: Variant) -> str:
    section = variant.scenario.scheduler
    axes = section.model_dump(exclude={"policy"}, exclude_none=True)
    return ", ".join([section.policy, *(f"{axis} {value}" for axis, value in axes.items())])


def _predictions(variant: Variant) -> list[tuple[str, str]]:
    section = variant.scenario.predictor
    if section.kind == "none":
        return []
    usual = {"kind", "window_tokens", "statistic", "update_predictions"}
    own = section.model_dump(exclude=usual, exclude_none=True, exclude_defaults=True)
    told = [section.kind, *(f"{key} {value}" for key, value in own.items()), f"its {section.statistic}"]
    again = (
        f"again every {section.window_tokens} tokens" if section.update_predictions else "before the first token alone"
    )
    return [("predictor", ", ".join([*told, again]))]


def _deployment_facts(variant: Variant) -> list[tuple[str, str]]:
    d = variant.deployment
    p = d.parallel
    return [
        ("model", f"{d.model.name}, {d.limits.weight_dtype or d.model.dtype} weights"),
        ("hardware", f"{p.gpus} x {d.gpu.name} ({d.node.name}), {d.price_per_hour_usd:.2f} $/h"),
        ("cut", f"tp {p.tp}, pp {p.pp}, replicas {p.replicas}"),
        ("scheduler", _scheduler(variant)),
        *_predictions(variant),
        ("costs", d.cost.source + _roofline_note(d.cost.source)),
        *([("fit", fit_note(d.cost))] if d.cost.fit else []),
        ("longest request", f"{d.max_model_len:,} tokens"),
    ]


def _fit_rows(cost: CostTables) -> list[tuple[str, str, str]]:
    return [(one.operator, f"{100 * one.median:.2f}%", f"{100 * one.p95:.2f}%") for one in cost.fit]


def _roofline_note(source: str) -> str:
    return "" if source.startswith("roofline") else "; the operators below are the roofline's"


def _memory_rows(variant: Variant) -> list[tuple[str, str, str]]:
    d, kv = variant.deployment, variant.deployment.kv
    cache = kv.num_blocks * kv.kv_bytes_per_block
    tokens = kv.num_blocks * kv.block_size
    return [
        ("memory", gib(d.gpu.memory_bytes), ""),
        ("available", gib(kv.available_bytes), f"at {d.limits.gpu_memory_utilization:.0%}, less the framework's"),
        ("weights", gib(kv.weight_bytes), f"{kv.weight_bytes / kv.available_bytes:.0%} of it"),
        ("activations", gib(kv.activation_bytes), f"of {d.limits.max_num_batched_tokens:,} tokens a step"),
        ("KV cache", gib(cache), f"{kv.num_blocks:,} blocks of {kv.block_size}: {tokens:,} tokens"),
    ]


def _fit_row(variant: Variant, fit: Fit) -> tuple[str, str, str]:
    by = "KV cache" if fit.by_memory < variant.deployment.limits.max_num_seqs else "max_num_seqs"
    reserved = f", {fit.reserved_tokens:,} tokens reserved for each" if fit.reserved_tokens else ""
    spare = f" (memory would hold {fit.by_memory:,}{reserved})" if fit.by_memory > fit.seqs else reserved
    return f"{fit.context_tokens:,} tokens", f"{fit.seqs:,}", by + spare


def _operator_rows(steps: list[Step]) -> list[list[str]]:
    names = list(dict.fromkeys(o.name for step in steps for o in step.operators))
    rows = [[name, *(_operator_cell(step, name) for step in steps)] for name in names]
    shares = [step.bound_shares for step in steps]
    return [
        *rows,
        ["", *("" for _ in steps)],
        ["step", *(duration(step.seconds) for step in steps)],
        ["tokens a second", *(f"{step.tokens / step.seconds:,.0f}" for step in steps)],
        ["data sheet's floor", *(f"{duration(s.floor_s)} {s.floor_s / s.seconds:4.0%}" for s in steps)],
        *([f"bound by {bound}", *(f"{share[bound]:.0%}" for share in shares)] for bound in _BOUND),
    ]


def _operator_cell(step: Step, name: str) -> str:
    for operator in step.operators:
        if operator.name == name:
            share = operator.seconds / step.seconds
            return f"{duration(operator.seconds)} {share:4.0%} {_BOUND[operator.bound]}"
    return "-"
