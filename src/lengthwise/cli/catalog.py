"""``lengthwise catalog``: what is known by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

import typer

from lengthwise import catalog
from lengthwise import policy as room
from lengthwise import workload as workloads_room
from lengthwise.cli.tables import count, gib, print_facts, print_table, si
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.specs import AttentionSpec, FfnSpec, LinkSpec, ModelSpec

# \b keeps the lines below it as they are.
EXAMPLES = """\b
Examples:
  lengthwise catalog gpus
  lengthwise catalog models llama-2-70b
"""
KINDS = ("models", "gpus", "nodes", "policies", "workloads")


def _kinds(incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def _names(context: typer.Context, incomplete: str) -> list[str]:

    known = names(context.params.get("kind") or "")
    return [name for name in known if name.startswith(incomplete)]


def run(
    kind: Annotated[
        str | None,
        typer.Argument(help=f"One of: {', '.join(KINDS)}. Without it: how many of each.", autocompletion=_kinds),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="One entry, with its numbers and sources.", autocompletion=_names)
    ] = None,
) -> None:
    """Show the known models, GPUs, nodes, policies and workloads."""
    if kind is None:
        overview()
    elif name is None:
        listing(kind)
    else:
        entry(kind, name)


_ONLY_THE_BOUND = "only scheduler.max_wait_s bounds the wait"
_EXAMPLES = {
    "bins": "(boundaries=[100, 300])",
    **dict.fromkeys(("equal_mass", "uniform_optimal", "exponential", "learned"), "(k=8)"),
}


def policies() -> None:
    """All policies and named schedulers."""
    rows = [(axis, *_bare(name, _plain(doc))) for axis, name, doc in all_policies()]
    print_table(("axis", "name", "what it does"), rows)


def _bare(name: str, doc: str) -> tuple[str, str]:
    """A policy's name without its parameters, which are told after what it does."""
    bare, _, parameters = name.rstrip(")").partition("(")
    return bare, f"{doc} Takes {parameters}." if parameters else doc


def all_policies() -> list[tuple[str, str, str]]:
    """Policies, and the bins that a scenario cuts from its own workload."""
    from lengthwise.usecases.variants import BINNING_RULES

    return [*room.catalog(), *(("binning", f"{name}(k)", doc) for name, doc in BINNING_RULES.items())]


def _plain(doc: str) -> str:
    """A docstring's line without its marks of code."""
    return doc.replace("``", "")


def policy(name: str) -> None:
    """Every policy or scheduler of one name; a policy with parameters by its bare name or with some given."""
    wanted = name.partition("(")[0]
    rows = [row for row in all_policies() if row[1].partition("(")[0] == wanted]
    if not rows:
        raise UnknownNameError("policy", name, policy_names())
    for axis, found, doc in rows:
        print_facts(found, [("axis", axis), ("what it does", _plain(doc)), *_takes(axis, found)])


def _takes(axis: str, name: str) -> list[tuple[str, str]]:
    if axis == "scheduler":
        return _parts(name)
    bare, bracket, parameters = name.partition("(")
    example = bare + _EXAMPLES.get(bare, bracket + parameters)
    metadata = [("parameters", parameters.rstrip(")"))] if bracket else []
    metadata += [("in a file", f'[scheduler] {axis} = "{example}"')]
    if axis == "binning" and bare not in room.known(axis) and bare != "bins":
        return metadata
    found = room.resolve(axis, example)
    metadata.insert(0, ("looks at", ", ".join(found.arguments)))
    return [*metadata, ("starvation", found.starvation or _ONLY_THE_BOUND)] if axis == "rank" else metadata


def _parts(name: str) -> list[tuple[str, str]]:
    """A named scheduler's axes, as a file may change them."""
    whole: Scheduler = room.scheduler(name)
    rank = room.resolve("rank", whole.rank)
    return [
        ("in a file", f'[scheduler] policy = "{name}"'),
        ("preempt", whole.preempt),
        ("router", str(whole.router)),
        ("starvation", rank.starvation or _ONLY_THE_BOUND),
        *_waits(whole),
    ]


def _waits(complete: Scheduler) -> list[tuple[str, str]]:
    """The bounds on waiting that a named scheduler brings along."""
    bounds = {"max_wait_s": complete.max_wait_s, "batch_wait_s": complete.batch_wait_s}
    return [(key, f"{s:g} (inf lifts it)") for key, s in bounds.items() if math.isfinite(s)]


def policy_names() -> list[str]:
    """The names of all policies, schedulers and rules, without parameters."""
    return sorted({row[1].partition("(")[0] for row in all_policies()})


Page = TypeVar("Page")


def overview() -> None:
    """How much there is of each kind."""
    sizes = {
        "models": len(catalog.models()),
        "gpus": len(catalog.gpus()),
        "nodes": len(catalog.nodes()),
        "policies": len(all_policies()),
        "workloads": len(workloads_room.presets()),
    }
    rows = [(kind, str(size), f"lengthwise catalog {kind}") for kind, size in sizes.items()]
    print_table(("kind", "entries", "show them"), rows)


def listing(kind: str) -> None:
    """All entries of a kind; raises UnknownNameError for what is none."""
    _page(kind, _LISTS)()


def entry(kind: str, name: str) -> None:
    """One entry of a kind; raises UnknownNameError."""
    _page(kind, _ENTRIES)(name)


def names(kind: str) -> list[str]:
    """The names of a kind, for completion; none of an unknown kind."""
    find = _NAMES.get(kind)
    return sorted(find()) if find else []


def _page(kind: str, pages: dict[str, Page]) -> Page:
    for known in (kind, f"{kind}s", f"{kind[:-1]}ies"):  # "gpu" and "policy" will do
        if known in pages:
            return pages[known]
    raise UnknownNameError("kind of catalog entry", kind, pages)


def models() -> None:
    """All models."""
    rows = (
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
    )
    columns = ("model", "params", "layers", "hidden", "attention", "feed-forward", "context", "KV a token", "dtype")
    drops = ("dtype", "hidden", "feed-forward", "layers", "KV a token")
    print_table(columns, rows, wraps=("attention", "feed-forward"), drops=drops)


def model(name: str) -> None:
    """One model, by name or from a config.json."""
    m = catalog.model(name)
    print_facts(m.name, _model_facts(m))


def _model_facts(m: ModelSpec) -> list[tuple[str, str]]:
    published = m.metadata.published_params
    return [
        ("parameters", f"{catalog.parameters(m):,}" + (f" (published: {count(published)})" if published else "")),
        ("active a token", count(catalog.active_parameters(m)) if m.ffn.experts else ""),
        ("weights", gib(catalog.weight_bytes(m))),
        ("KV a token", f"{catalog.kv_bytes_per_token(m) / 1024:,.1f} KiB"),
        ("layers", f"{m.layers}" + (f" and {m.encoder_layers} of an encoder" if m.encoder_layers else "")),
        ("hidden", f"{m.hidden:,}"),
        ("vocabulary", f"{m.vocab:,}" + (" (head tied to the embedding)" if m.tied_embeddings else "")),
        ("attention", _attention(m.attention)),
        ("feed-forward", _ffn(m.ffn)),
        ("context", f"{m.max_model_len:,} tokens"),
        ("dtype", m.dtype),
        ("also called", ", ".join(m.metadata.aliases)),
        ("source", m.metadata.source),
    ]


def _attention(a: AttentionSpec) -> str:
    if a.is_mla:
        text = f"MLA {a.heads} heads, latent {a.kv_lora_rank}+{a.rope_head_dim}"
    else:
        kind = "MHA" if a.kv_heads == a.heads else "MQA" if a.kv_heads == 1 else "GQA"
        text = f"{kind} {a.heads}/{a.kv_heads} x {a.head_dim}"
    return text + (f", window {a.window_tokens:,}" if a.window_tokens else "")


def _ffn(f: FfnSpec) -> str:
    gated = "gated" if f.gated else "plain"
    if not f.experts:
        return f"{gated} {f.intermediate:,}"
    shared = f" + shared {f.shared_intermediate:,}" if f.shared_intermediate else ""
    return f"MoE {f.experts_per_token} of {f.experts} x {f.expert_intermediate:,}{shared}"


def gpus() -> None:
    """All GPUs."""
    rows = (
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
    )
    print_table(("GPU", "memory", "bandwidth", "16 bits", "fp8", "TDP", "price"), rows, drops=("TDP", "fp8"))


def gpu(name: str) -> None:
    """One GPU."""
    g = catalog.gpu(name)
    metadata = [
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
    print_facts(g.name, metadata)


def nodes() -> None:
    """All nodes."""
    rows = (
        (name, str(n.gpus), _link(n.link), str(n.link_group), _link(n.fallback_link), _link(n.network))
        for name, n in catalog.nodes().items()
    )
    columns = ("node", "GPUs", "link", "GPUs it joins", "beyond them", "between nodes")
    print_table(columns, rows, drops=("beyond them", "GPUs it joins"))


def node(name: str) -> None:
    """One node."""
    n = catalog.node(name)
    metadata = [
        ("GPUs", str(n.gpus)),
        ("link", f"{_link(n.link)}, joins {n.link_group} GPUs ({n.link.source})"),
        ("beyond them", f"{_link(n.fallback_link)} ({n.fallback_link.source})"),
        ("between nodes", f"{_link(n.network)} ({n.network.source})"),
        ("also called", ", ".join(n.aliases)),
        ("source", n.source),
    ]
    print_facts(n.name, metadata)


def _link(link: LinkSpec) -> str:
    return f"{link.name} {si(link.bandwidth_bytes_per_s, 'B/s')}, {link.latency_s * 1e6:g} us"


def workloads() -> None:
    """All workload presets."""
    print_table(("workload", "what it is"), [(name, p.description) for name, p in workloads_room.presets().items()])


def workload(name: str) -> None:
    """One workload preset."""
    p = workloads_room.preset(name)
    metadata = [
        ("what it is", p.description),
        ("in a file", f'[workload] preset = "{p.name}"'),
        ("lengths", f"lengthwise workload show {p.name}"),
        ("source", p.source),
        ("license", p.license),
    ]
    print_facts(p.name, metadata)


_LISTS: dict[str, Callable[[], None]] = {
    "models": models,
    "gpus": gpus,
    "nodes": nodes,
    "policies": policies,
    "workloads": workloads,
}
_ENTRIES: dict[str, Callable[[str], None]] = {
    "models": model,
    "gpus": gpu,
    "nodes": node,
    "policies": policy,
    "workloads": workload,
}
_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "models": catalog.models,
    "gpus": catalog.gpus,
    "nodes": catalog.nodes,
    "policies": policy_names,
    "workloads": workloads_room.presets,
}
