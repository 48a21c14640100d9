"""``lengthwise catalog``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, NamedTuple

import typer
from typer import Argument

from lengthwise import catalog, policy, workload
from lengthwise.cli.tables import count, gib, print_properties, print_table, si
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.specs import AttentionSpec, FfnSpec, LinkSpec

Entries = list[tuple[str, list[tuple[str, str]]]]
"""Titles, each with its names and values."""

EXAMPLES = """\b
Examples:
  lengthwise catalog gpus
  lengthwise catalog models llama-2-70b
"""


def _complete_kind(incomplete: str) -> list[str]:
    return [kind for kind in _KINDS if kind.startswith(incomplete)]


def _complete_name(context: typer.Context, incomplete: str) -> list[str]:
    kind = context.params.get("kind")
    return [name for name in names(kind) if name.startswith(incomplete)] if kind in _KINDS else []


def run(
    kind: Annotated[
        str | None,
        Argument(
            help="models, gpus, nodes, policies or workloads; default: the number of each.",
            autocompletion=_complete_kind,
        ),
    ] = None,
    name: Annotated[str | None, Argument(help="One entry in detail.", autocompletion=_complete_name)] = None,
) -> None:
    """List models, GPUs, nodes, policies and presets."""
    if kind is None:
        rows = [(kind, str(pages.size()), f"lengthwise catalog {kind}") for kind, pages in _KINDS.items()]
        print_table(("kind", "entries", "show them"), rows)
        return None
    if name is None:
        return _pages(kind).show_all()
    for title, properties in entry(kind, name):
        print_properties(title, properties)
    return None


def _pages(kind: str) -> _Pages:
    for known in (kind, f"{kind}s", f"{kind[:-1]}ies"):  # "gpu" and "policy" are accepted
        if known in _KINDS:
            return _KINDS[known]
    raise UnknownNameError("kind of catalog entry", kind, _KINDS)


def names(kind: str) -> list[str]:
    """Return the sorted names of a kind of entry ("models"). Raises UnknownNameError for an unknown kind."""
    return sorted(_pages(kind).names())


def entry(kind: str, name: str) -> Entries:
    """Return the properties of an entry as pairs of text; a policy has them for each axis with its name.

    Raises UnknownNameError for an unknown kind or name.
    """
    return _pages(kind).entries(name)


def _show_models() -> None:
    rows = [
        (
            name,
            count(catalog.parameters(m)),
            str(m.layers),
            f"{m.hidden:,}",
            _attention(m.attention),
            _ffn(m.ffn),
            f"{m.max_model_len:,}",
            f"{catalog.kv_bytes_per_token(m) / 1024:,.0f} KiB",
            m.dtype,
        )
        for name, m in catalog.models().items()
    ]
    columns = ("model", "params", "layers", "hidden", "attention", "feed-forward", "context", "KV a token", "dtype")
    drops = ("dtype", "hidden", "feed-forward", "layers", "KV a token")
    print_table(columns, rows, wraps=("attention", "feed-forward"), drops=drops)


def _model_properties(name: str) -> Entries:
    m = catalog.model(name)  # or a config.json
    published, states = m.metadata.published_params, catalog.state_bytes_per_sequence(m)
    properties = [
        ("parameters", f"{catalog.parameters(m):,}" + (f" (published: {count(published)})" if published else "")),
        ("active a token", count(catalog.active_parameters(m)) if m.ffn.experts else ""),
        ("weights", gib(catalog.weight_bytes(m))),
        ("KV a token", f"{catalog.kv_bytes_per_token(m) / 1024:,.1f} KiB"),
        ("state a sequence", f"{states / 1024:,.0f} KiB" if states else ""),
        ("layers", f"{m.layers}" + (f" and {m.encoder_layers} of an encoder" if m.encoder_layers else "")),
        ("hidden", f"{m.hidden:,}"),
        ("vocabulary", f"{m.vocab:,}" + (" (head tied to the embedding)" if m.tied_embeddings else "")),
        ("attention", _attention(m.attention)),
        ("feed-forward", _ffn(m.ffn)),
        ("context", f"{m.max_model_len:,} tokens"),
        ("dtype", m.dtype),
        ("also called", ", ".join(m.metadata.aliases)),
        ("source", m.metadata.source),
        ("simplified", " ".join(catalog.approximations(m))),
    ]
    return [(m.name, properties)]


def _attention(a: AttentionSpec) -> str:
    if a.is_mla:
        text = f"MLA {a.heads} heads, latent {a.kv_lora_rank}+{a.rope_head_dim}"
    else:
        kind = "MHA" if a.kv_heads == a.heads else "MQA" if a.kv_heads == 1 else "GQA"
        text = f"{kind} {a.heads}/{a.kv_heads} x {a.head_dim}"
    text += f", sparse by {a.index_heads} x {a.index_head_dim}" if a.index_heads else ""
    text += f", {a.linear.layers} layers linear" if a.linear else ""
    return text + (f", window {a.window_tokens:,}" if a.window_tokens else "")


def _ffn(f: FfnSpec) -> str:
    if not f.experts:
        return f"{'gated' if f.gated else 'plain'} {f.intermediate:,}"
    shared = f" + shared {f.shared_intermediate:,}" if f.shared_intermediate else ""
    return f"MoE {f.experts_per_token} of {f.experts} x {f.expert_intermediate:,}{shared}"


def _show_gpus() -> None:
    rows = [
        (
            name,
            gib(g.memory_bytes),
            si(g.bandwidth_bytes_per_s, "B/s"),
            si(g.flops("bfloat16"), "FLOP/s"),
            si(g.peak_flops["fp8"], "FLOP/s") if "fp8" in g.peak_flops else "-",
            f"{g.tdp_w:,.0f} W",
            f"{g.price_per_hour_usd:.2f} $/h",
        )
        for name, g in catalog.gpus().items()
    ]
    print_table(("GPU", "memory", "bandwidth", "16 bits", "fp8", "TDP", "price"), rows, drops=("TDP", "fp8"))


def _gpu_properties(name: str) -> Entries:
    g = catalog.gpu(name)
    properties = [
        ("memory", gib(g.memory_bytes)),
        ("bandwidth", si(g.bandwidth_bytes_per_s, "B/s")),
        *((f"peak {dtype}", si(flops, "FLOP/s, dense")) for dtype, flops in g.peak_flops.items()),
        ("ridge", f"{g.flops('bfloat16') / g.bandwidth_bytes_per_s:,.0f} FLOP a byte at 16 bits"),
        ("power", f"{g.tdp_w:,.0f} W, idle {g.idle_w:,.0f} W"),
        ("price", f"{g.price_per_hour_usd:.2f} $/h: {g.price_source}"),
        ("usual node", catalog.default_node(g, 1).name),
        ("also called", ", ".join(g.aliases)),
        ("source", g.source),
    ]
    return [(g.name, properties)]


def _show_nodes() -> None:
    rows = [
        (name, str(n.gpus), _link(n.link), str(n.link_group), _link(n.fallback_link), _link(n.network))
        for name, n in catalog.nodes().items()
    ]
    columns = ("node", "GPUs", "link", "GPUs it joins", "beyond them", "between nodes")
    print_table(columns, rows, drops=("beyond them", "GPUs it joins"))


def _node_properties(name: str) -> Entries:
    n = catalog.node(name)
    properties = [
        ("GPUs", str(n.gpus)),
        ("link", f"{_link(n.link)}, joins {n.link_group} GPUs ({n.link.source})"),
        ("beyond them", f"{_link(n.fallback_link)} ({n.fallback_link.source})"),
        ("between nodes", f"{_link(n.network)} ({n.network.source})"),
        ("also called", ", ".join(n.aliases)),
        ("source", n.source),
    ]
    return [(n.name, properties)]


def _link(link: LinkSpec) -> str:
    return f"{link.name} {si(link.bandwidth_bytes_per_s, 'B/s')}, {link.latency_s * 1e6:g} us"


_DEFAULT_STARVATION = "only scheduler.max_wait_s bounds the wait"
_PARAMETER_EXAMPLES = {
    "bins": "(boundaries=[100, 300])",
    **dict.fromkeys(("equal_mass", "uniform_optimal", "exponential", "learned"), "(k=8)"),
}


def _policies() -> list[tuple[str, str, str]]:
    """Return (axis, name with parameters, effect) of all policies, schedulers and binning rules of scenario files."""
    from lengthwise.usecases.variants import BINNING_RULES

    rules = (("binning", f"{name}(k)", doc) for name, doc in BINNING_RULES.items())
    return [(axis, name, doc.replace("``", "")) for axis, name, doc in (*policy.catalog(), *rules)]


def _policy_names() -> list[str]:
    return sorted({name.partition("(")[0] for _, name, _ in _policies()})


def _show_policies() -> None:
    rows = []
    for axis, name, doc in _policies():
        bare, _, parameters = name.rstrip(")").partition("(")
        rows.append((axis, bare, f"{doc} Takes {parameters}." if parameters else doc))
    print_table(("axis", "name", "what it does"), rows)


def _policy_properties(name: str) -> Entries:
    rows = [row for row in _policies() if row[1].partition("(")[0] == name.partition("(")[0]]
    if not rows:
        raise UnknownNameError("policy", name, _policy_names())
    entries = []
    for axis, found, doc in rows:
        details = _scheduler_details(found) if axis == "scheduler" else _policy_details(axis, found)
        entries.append((found, [("axis", axis), ("what it does", doc), *details]))
    return entries


def _scheduler_details(name: str) -> list[tuple[str, str]]:
    scheduler = policy.scheduler(name)
    bounds = {"max_wait_s": scheduler.max_wait_s, "batch_wait_s": scheduler.batch_wait_s}
    return [
        ("in a file", f'[scheduler] policy = "{name}"'),
        ("preemption_mode", scheduler.preemption_mode),
        ("router", str(scheduler.router)),
        ("starvation", policy.resolve("rank", scheduler.rank).starvation or _DEFAULT_STARVATION),
        *((key, f"{s:g} (inf removes the bound)") for key, s in bounds.items() if math.isfinite(s)),
    ]


def _policy_details(axis: str, name: str) -> list[tuple[str, str]]:
    bare, bracket, parameters = name.partition("(")
    example = bare + _PARAMETER_EXAMPLES.get(bare, bracket + parameters)
    details = [("parameters", parameters.rstrip(")"))] if bracket else []
    details += [("in a file", f'[scheduler] {axis} = "{example}"')]
    if axis == "binning" and bare not in policy.known(axis) and bare != "bins":
        return details  # a rule of scenario files, which no policy implements
    found = policy.resolve(axis, example)
    starvation = [("starvation", found.starvation or _DEFAULT_STARVATION)] if axis == "rank" else []
    return [("looks at", ", ".join(found.arguments)), *details, *starvation]


def _show_workloads() -> None:
    rows = [(name, preset.description) for name, preset in workload.presets().items()]
    print_table(("workload", "what it is"), rows)


def _workload_properties(name: str) -> Entries:
    p = workload.preset(name)
    properties = [
        ("what it is", p.description),
        ("in a file", f'[workload] preset = "{p.name}"'),
        ("lengths", f"lengthwise workload show {p.name}"),
        ("source", p.source),
        ("license", p.license),
    ]
    return [(p.name, properties)]


class _Pages(NamedTuple):
    names: Callable[[], Iterable[str]]
    size: Callable[[], int]
    show_all: Callable[[], None]
    entries: Callable[[str], Entries]


_KINDS = {
    "models": _Pages(catalog.models, lambda: len(catalog.models()), _show_models, _model_properties),
    "gpus": _Pages(catalog.gpus, lambda: len(catalog.gpus()), _show_gpus, _gpu_properties),
    "nodes": _Pages(catalog.nodes, lambda: len(catalog.nodes()), _show_nodes, _node_properties),
    "policies": _Pages(_policy_names, lambda: len(_policies()), _show_policies, _policy_properties),
    "workloads": _Pages(workload.presets, lambda: len(workload.presets()), _show_workloads, _workload_properties),
}
