"""``lengthwise explain``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from lengthwise.cli import options
from lengthwise.cli.options import Columns, CostSource, Gpu, Model, OptionalScenario, Tp, WorkloadName
from lengthwise.cli.tables import duration, fit_note, gib, print_properties, print_table

if TYPE_CHECKING:
    from lengthwise.schema.deployment import DecodeSide, Deployment, KvGroups, KVTransfer, Parallelism
    from lengthwise.usecases.explain import CacheTier, Explanation, LargestBatch, RequestExplanation, Sides, Step
    from lengthwise.usecases.variants import Variant

EXAMPLES = """\b
Examples:
  lengthwise explain --model qwen3-32b --gpu L40S
  lengthwise explain examples/chat-70b.toml --set deployment.tp=2
  lengthwise explain examples/multi-turn.toml --variant "prefix cache" --request 17
"""


def run(
    scenario_file: OptionalScenario = None,
    *,
    model: Model = None,
    gpu: Gpu = None,
    tp: Tp = None,
    workload: WorkloadName = None,
    column: Columns = None,
    set_: Annotated[list[str] | None, options.setting("deployment.tp=2")] = None,
    variant: Annotated[str | None, Option(metavar="NAME", help="Only this variant of the scenario.")] = None,
    cost: CostSource = None,
    request: Annotated[
        int | None,
        Option(min=0, metavar="NUMBER", help="Simulate the first seed, and explain this request only, from 0."),
    ] = None,
) -> None:
    """Show what a step costs, what fits in memory and what a scenario resolves to.

    Lists the largest batches, each operator's time and the resource that bounds it, without a simulation. With
    --request, it simulates the first seed and shows what the request waited for, and what the prefix cache saved.
    """
    from lengthwise.usecases import short_options
    from lengthwise.usecases.explain import by_group, explain, explain_request
    from lengthwise.usecases.variants import build

    scenario = short_options.scenario_of(
        scenario_file,
        [*short_options.columns(column), *options.overrides(set_, cost)],
        model=model,
        gpu=gpu,
        tp=tp,
        workload=workload,
    )
    if variant is not None:
        scenario = scenario.only(variant)
    options.print_notes(scenario.notes)
    if request is not None:
        for one in build(scenario):
            show_request(one, explain_request(one, request, scenario.run.seed))
        return
    shown: list[tuple[tuple[object, ...], str]] = []
    for one in by_group(build(scenario)):
        found, sections = explain(one), one.scenario
        # All that the page shows except for the scheduler, of which only the effects on memory and steps count.
        page = (
            sections.deployment, sections.engine, sections.workload, sections.predictor, found.fits,
            found.by_prediction, [step.name for step in found.steps], one.deployment.gpu, one.deployment.parallel,
        )  # fmt: skip
        same = next((name for other, name in shown if other == page), None)
        if shown:
            typer.echo()
        if same is not None:
            print_properties(one.name, [("scheduler", _scheduler(one)), ("the rest", f"as {same}")])
            continue
        show(one, found)
        shown.append((page, one.name))


def show_request(variant: Variant, found: RequestExplanation) -> None:
    """Print what one request waited for, what it found in the prefix cache, and when it was served."""
    at, is_caching = found.times_s, variant.deployment.limits.enable_prefix_caching
    place = "" if found.session is None or found.turn is None else f"session {found.session}, turn {found.turn + 1}"
    waited = ""
    if found.parents:
        names = ", ".join(f"{parent:,}" for parent in found.parents)
        waited = (
            f"request{'s' if len(found.parents) > 1 else ''} {names}; sent {found.delay_s:.3g} s after the last end"
        )
    turn = f"its previous turn (request {found.previous_turn:,}) or " if found.previous_turn >= 0 else ""
    shared = f"{found.shared_tokens:,} tokens, with {turn}other requests" if found.shared_tokens else "nothing"
    use = found.cache
    cached = "the prefix cache is off" if not is_caching else f"{use.cached_tokens:,} tokens"
    loaded = ""
    saved = f"; they save {duration(use.saved_s)} of prefill alone on an idle replica"
    if is_caching and use.cached_tokens:
        cached += f", {use.cached_tokens / found.prompt_tokens:.0%} of the prompt"
        cached += "" if use.loaded_tokens else saved
    if use.loaded_tokens:
        loaded = f"{use.loaded_tokens:,} tokens from CPU memory in {duration(use.load_s)}, "
        loaded += f"{use.loaded_tokens / found.prompt_tokens:.0%} of the prompt"
        loaded += f", {use.storage_tokens:,} of them read from storage before" if use.storage_tokens else ""
        loaded += f"; with the cached ones{saved.removeprefix(';')}" if use.cached_tokens else saved
    previous = f" (the turn before: replica {found.previous_replica})" if found.previous_replica >= 0 else ""

    def since(name: str) -> str:
        return duration(at[name] - at["arrival_s"]) if math.isfinite(at[name]) else ""

    print_properties(
        f"{variant.name}, request {found.number:,}",
        [
            ("session", place),
            ("waits for", waited),
            ("prompt", f"{found.prompt_tokens:,} tokens"),
            ("begins with", shared),
            ("cached", cached),
            ("loaded", loaded),
            ("replica", f"{found.replica}{previous}" if found.replica >= 0 else ""),
            ("sent at", f"{at['arrival_s']:.3f} s" if math.isfinite(at["arrival_s"]) else "never"),
            ("queueing", since("scheduled_s")),
            ("TTFT", since("first_token_s")),
            ("JCT", since("finished_s")),
            ("outcome", f"{found.status.name.lower().replace('_', ' ')}, {found.output_tokens:,} output tokens"),
        ],
    )


_SHARING = {"fcfs": ", one at a time", "fair": ", links shared", "none": ""}
_BOUND = {"compute": "c", "memory": "m", "network": "n", "latency": "l"}


def _groups(groups: KvGroups) -> str:
    kind = "chunks" if groups.chunked else "a window"
    parts = {
        "of full attention": groups.full,
        f"with {kind} of {groups.local_tokens:,} tokens": 0 if groups.aligned else groups.local,
        "of states": groups.local if groups.aligned else groups.states,
    }
    return ", ".join(f"{count} {name}" for name, count in parts.items() if count)


def _degrees(p: Parallelism) -> str:
    experts = ""
    if p.dp > 1 or p.ep > 1:
        more = "" if p.redundant_experts is None else f" (EPLB, {p.redundant_experts} redundant experts)"
        experts = f"dp {p.dp}, ep {p.ep}{more}, {f'{p.all2all_backend}, ' if p.dp > 1 else ''}"
    return f"tp {p.tp}, pp {p.pp}, {experts}replicas {p.replicas}"


def _source(side: Deployment) -> str:
    source = side.cost.evidence.source
    return source if source.startswith("roofline") else f"{source}; the operators below are the roofline's"


def show(variant: Variant, found: Explanation) -> None:
    """Print a variant's deployment, its memory, the batches that fit, and the operators of typical steps."""
    d, sides = found.deployment, found.sides
    weights, source = d.limits.weight_dtype or d.model.dtype, "; ".join(dict.fromkeys(_source(s) for s in d.sides))
    nodes = ", ".join(dict.fromkeys(side.node.name for side in d.sides))
    rows = [("parallelism", _degrees(d.parallel))]
    if sides is not None and d.decode is not None:
        transfer = f"{duration(sides.transfer_s)} for a mean prompt"
        named = zip(("prefill", "decode"), d.sides, strict=True)
        rows = [
            *((f"{name} side", f"{_degrees(side.parallel)}, on {side.hardware}") for name, side in named),
            ("KV transfer", transfer + _transfer_rules(d.decode.kv_transfer, sides.transfer_s)),
            ("prefilled by decode side", _local_prefill(d.decode)),
        ]
    print_properties(
        variant.name,
        [
            ("model", f"{d.model.name}, {weights} weights"),
            ("hardware", f"{d.hardware} ({nodes}), {d.price_per_hour_usd:.2f} $/h"),
            *rows,
            ("scheduler", _scheduler(variant)),
            ("predictor", _predictor(variant)),
            *_caches(found),
            ("costs", source),
            ("fit", fit_note(d.cost.evidence.fit) if d.cost.evidence.fit else ""),
            ("KV cache groups", _groups(d.kv.groups) if d.kv.groups else ""),
            ("longest request", f"{d.max_model_len:,} tokens"),
        ],
    )
    typer.echo()
    if variant.scenario.engine.name:
        _show_engines(variant)
    if sides is None:
        _show_replica(found, "a replica")
    else:
        _show_sides(sides)
        _show_replica(found, "a prefill replica")
        typer.echo()
        _show_replica(sides.decode, "a decode replica")
    for note in found.notes:
        typer.echo(f"note: {note}")


def _transfer_rules(link: KVTransfer, mean_s: float) -> str:
    """Return what simultaneous transfers do, when they begin and end, and what happens to those that wait too long."""
    late = "fails" if link.kv_load_failure_policy == "fail" else "is recomputed"
    limit = f"; a request {late} that waits {duration(link.timeout_s)} for it" if math.isfinite(link.timeout_s) else ""
    early = ""
    if link.layers:  # what remains after a step that is at least as long as the transfer of the other layers
        last_s = link.fixed_s + max(0.0, mean_s - link.fixed_s) / link.layers
        early = "; layer by layer, from the start of the step that completes a prompt to "
        early += f"{duration(last_s)} or more after its end"
    switch = f", and a switch as fast as {link.links_at_once:.3g} of them"
    return _SHARING[link.sharing] + switch * math.isfinite(link.links_at_once) + early + limit


def _local_prefill(side: DecodeSide) -> str:
    """Return which prompts decode replicas prefill, or "" if they prefill none."""
    parts = [f"prompts of up to {side.max_local_prefill_length:,} tokens"] if side.max_local_prefill_length else []
    if side.max_prefill_queue_size is not None:
        parts.append(f"any while {side.max_prefill_queue_size:,} or more wait on the prefill side")
    return ", and ".join(parts)


def _show_sides(sides: Sides) -> None:
    """Print the bound of each part on the rate, and the numbers of replicas that would be balanced."""
    rows = [
        (name, f"{rate:,.3g}" if math.isfinite(rate) else "no limit", "*" if name == sides.binds else "")
        for name, rate in sides.rates_rps.items()
    ]
    print_table(("part", "at most, requests/s", "binds"), rows)
    ratio = sides.decodes_per_prefill
    if math.isfinite(ratio) and ratio > 0:
        each = (
            f"{ratio:.3g} decode replicas for each prefill replica"
            if ratio >= 1
            else (f"{1 / ratio:.3g} prefill replicas for each decode replica")
        )
        typer.echo(f"Without preemptions, both sides have the same bound with {each}.")
    typer.echo()


def _show_replica(found: Explanation, replica: str) -> None:
    """Print the memory of a replica, the batches that fit, and the operators of its steps."""
    d, kv, evidence = found.deployment, found.deployment.kv, found.deployment.cost.evidence
    tokens = f"{kv.kv_tokens(d.max_model_len):,} tokens" + (" of longest requests" if kv.groups else "")
    rank = "" if d.parallel.dp == 1 else f", of one of {d.parallel.dp} data-parallel ranks"
    memory = [
        ("memory", gib(d.gpu.memory_bytes), ""),
        ("available", gib(kv.available_bytes), f"at {d.limits.gpu_memory_utilization:.0%}, less the framework's"),
        ("weights", gib(kv.weight_bytes), f"{kv.weight_bytes / kv.available_bytes:.0%} of the available"),
        (
            "activations", gib(kv.activation_bytes - kv.exchange_bytes),
            f"of {d.limits.max_num_batched_tokens:,} tokens a step{rank and ' of a rank'}",
        ),
        *[("exchange buffers", gib(kv.exchange_bytes), f"of {d.parallel.all2all_backend}")] * (kv.exchange_bytes > 0),
        (
            "KV cache", gib(kv.num_blocks * kv.kv_bytes_per_block),
            f"{kv.num_blocks:,} blocks of {kv.block_size}: {tokens}{rank}",
        ),
    ]  # fmt: skip
    print_table((f"the fullest GPU of {replica}", "size", "of what"), memory)
    typer.echo()
    if found.tiers:
        head = ("prefixes are cached in", "size", "tokens", f"contexts of {found.context_tokens:,} tokens")
        print_table(head, [_tier_row(tier, found.context_tokens) for tier in found.tiers])
        typer.echo()
    print_table(
        ("context of each request", f"fit at once{rank and ' on a rank'}", "limited by"),
        [_fit_row(fit, d.limits.max_num_seqs) for fit in found.fits],
    )
    if found.by_prediction:
        typer.echo("The memory policy uses predictions: with them it may admit fewer or more requests.")
    if evidence.fit:
        typer.echo()
        errors = [(row.operator, f"{100 * row.median:.2f}%", f"{100 * row.p95:.2f}%") for row in evidence.fit]
        print_table(("fit of the profile, error", "median", "p95"), errors)
    dp = d.parallel.dp
    ranks = f", of which each of {dp} data-parallel ranks has such a batch" if dp > 1 else ""
    cached = f"; each decoding sequence has {found.context_tokens:,} tokens cached"
    decodes = any(not step.name.startswith("prompt") for step in found.steps)
    typer.echo(f"\nOne step of {replica}{ranks}{cached if decodes else ''}.")
    typer.echo("Bound by: c compute, m memory, n network, l latency.")
    steps = found.steps
    operators = dict.fromkeys(operator.name for step in steps for operator in step.operators)
    rows = [
        *([name, *(_operator_cell(step, name) for step in steps)] for name in operators),
        [""] * (len(steps) + 1),
        ["step", *(duration(step.seconds) for step in steps)],
        ["tokens a second", *(f"{step.tokens / step.seconds:,.0f}" for step in steps)],
        ["data sheet's floor", *(f"{duration(s.floor_s)} {s.floor_s / s.seconds:4.0%}" for s in steps)],
        *([f"bound by {bound}", *(f"{step.bound_shares[bound]:.0%}" for step in steps)] for bound in _BOUND),
    ]
    print_table(("operator", *(step.name for step in steps)), rows, wraps=("operator",))


def _toml_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _show_engines(variant: Variant) -> None:
    """Print the defaults of the scenario's engine beside those of the other ones, and what the scenario has."""
    from lengthwise.config.sections import ENGINES
    from lengthwise.usecases.variants import overlap_refusal, overlaps_by_engine

    scenario, deployed = variant.scenario, variant.deployment
    order = sorted(ENGINES, key=lambda name: name != scenario.engine.name)
    defaults = [ENGINES[name].of(name, deployed.gpu) for name in order]
    unmodelled = {"engine.enable_prefix_caching": "false*", "engine.prefix_cache": "not modelled"}
    rows = []
    for section, keys in defaults[0].items():
        for key in keys:
            values = {name: _toml_value(one[section][key]) for name, one in zip(order, defaults, strict=True)}
            values["here"] = _toml_value(getattr(getattr(scenario, section), key))
            if (name := f"{section}.{key}") in unmodelled:
                values["trtllm"] = unmodelled[name]
                if deployed.scheduler.trtllm is not None and key == "prefix_cache":
                    values["here"] = unmodelled[name]
            if key in getattr(scenario, section).model_fields_set:
                values["here"] += " (set)"
            rows.append((name, *values.values()))
    is_set = " (set)" if scenario.scheduler.async_scheduling is not None else ""
    overlap = ["true" if ENGINES[name].async_scheduling else "false*" for name in order]
    rows.append(("scheduler.async_scheduling", *overlap, _toml_value(deployed.scheduler.async_scheduling) + is_set))
    print_table(("setting", *(ENGINES[name].version for name in order), "here"), rows)
    typer.echo(
        f'"(set)": by the scenario; all other values of "here" are those of engine = "{scenario.engine.name}".\n'
        "* The server does so by default; the simulator does not model it for TensorRT-LLM."
    )
    if overlaps_by_engine(scenario) and (reason := overlap_refusal(deployed)):
        typer.echo(f"Steps do not overlap here: {reason}.")
    typer.echo()


def _caches(found: Explanation) -> list[tuple[str, str]]:
    """Return a row of rules and speeds for the prefix cache, and for each tier behind it; sizes are in a table."""
    limits = found.deployment.limits
    if not limits.enable_prefix_caching:
        text = "which engine.enable_prefix_caching = true would find"
        if found.deployment.scheduler.trtllm is not None:
            text = 'which no cache finds yet with scheduler "trtllm"'
        return [("prefix cache", f"off; prompts share prefixes, {text}")] if found.shares_prefixes else []
    size = f"{limits.block_size} token{'s' if limits.block_size > 1 else ''}"
    kinds = {
        "vllm": f"vLLM's, full blocks of {size}, least recently used evicted first",
        "sglang": f"SGLang's radix tree, pages of {size}, eviction {limits.radix_eviction_policy}",
    }
    rule, groups = kinds[limits.prefix_cache], found.deployment.kv.groups
    if groups is not None and groups.local:
        rule += f"; found if all KV cache groups have it, local ones the last {'chunk' if groups.chunked else 'window'}"
    rows, offloading = [("prefix cache", rule)], limits.kv_offloading
    if offloading is not None and len(found.tiers) > 1:
        blocks = "prompts and outputs" if offloading.outputs else "prompts"
        wait = f", {duration(offloading.latency_s)} each" if offloading.latency_s else ""
        when = "always" if offloading.load == "always" else "where faster than computing"
        speed = f"{offloading.gb_per_s:g} GB/s of each GPU in each direction{wait}"
        rows.append(("CPU memory", f"blocks of {blocks}; {speed}; loads {when}"))
    if offloading is not None and offloading.storage is not None and len(found.tiers) > 2:
        storage = offloading.storage
        wait = f", {duration(storage.latency_s)} each" if storage.latency_s else ""
        speed = f"reads {storage.read_gb_per_s:g} GB/s, writes {storage.write_gb_per_s:g} GB/s of each replica{wait}"
        shared = "replicas find what others have written" if storage.shared else "of each replica"
        rows.append(("storage", f"all blocks of the CPU memory, {shared}; {speed}"))
    return rows


def _tier_row(tier: CacheTier, context_tokens: int) -> tuple[str, str, str, str]:
    if math.isinf(tier.tokens):
        return tier.name, "no limit", "", ""
    return tier.name, f"{tier.gb:,.4g} GB", f"{tier.tokens:,.0f}", f"{tier.tokens // context_tokens:,.0f}"


def _scheduler(variant: Variant) -> str:
    """Return the named scheduler and the settings that differ from it, those of an engine's table without braces."""
    section = variant.scenario.scheduler
    own = section.model_dump(exclude={"policy", "reserve"}, exclude_defaults=True)
    own |= own.pop("sglang", {}) | own.pop("trtllm", {})
    parts = [f"{key} {_toml_value(value)}" for key, value in own.items()]
    return ", ".join([section.policy, *["memory reserved by predicted length"] * bool(section.reserve), *parts])


def _predictor(variant: Variant) -> str:
    section = variant.scenario.predictor
    if section.kind == "none":
        return ""
    shared = {"kind", "window_tokens", "statistic", "update_predictions"}
    own = section.model_dump(exclude=shared, exclude_none=True, exclude_defaults=True)
    updates = f"every {section.window_tokens} tokens" if section.update_predictions else "before the first token only"
    words = [section.kind, *(f"{key} {value}" for key, value in own.items()), f"its {section.statistic}", updates]
    return ", ".join(words)


def _fit_row(fit: LargestBatch, max_num_seqs: int) -> tuple[str, str, str]:
    limit = "KV cache" if fit.by_memory < max_num_seqs else "max_num_seqs"
    reserved = f", {fit.reserved_tokens:,} tokens reserved for each" if fit.reserved_tokens else ""
    note = f" (memory would fit {fit.by_memory:,}{reserved})" if fit.by_memory > fit.seqs else reserved
    return f"{fit.context_tokens:,} tokens", f"{fit.seqs:,}", limit + note


def _operator_cell(step: Step, name: str) -> str:
    for operator in step.operators:
        if operator.name == name:
            share = f"{operator.seconds / step.seconds:4.0%}" if operator in step.counted else "hidden"
            return f"{duration(operator.seconds)} {share} {_BOUND[operator.bound]}"
    return "-"
