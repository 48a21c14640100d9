"""Parts of launch commands that engines share: GPUs, checkpoints, scripts, and differences from the simulation."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lengthwise.policy import PREDICTION_ARGUMENTS, resolve
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import DoesNotFitError, InputError, UnknownNameError
from lengthwise.schema.specs import ModelSpec, dtype_name

FRACTION_ROOM, MAX_FRACTION = 0.1, 0.99  # of the memory
DEVICES = ("cuda", "cpu")
PLACEHOLDER = "$MODEL"  # stands in a command for a checkpoint that is not in the catalog


@dataclass(frozen=True)
class Launch:
    """A command line as unquoted words, with sentences (``notes``) on how the program differs from the simulation."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def replica_gpus(deployment: Deployment) -> int:
    """Return the number of GPUs of one replica."""
    return deployment.parallel.gpus_per_replica


def degrees(deployment: Deployment) -> str:
    """Return how a replica is divided, in words: tp and pp, and dp and ep if it has them."""
    p = deployment.parallel
    return f"tp {p.tp}, pp {p.pp}" + (f", dp {p.dp}, ep {p.ep}" if p.dp > 1 or p.ep > 1 else "")


def roles(deployment: Deployment) -> tuple[str, ...]:
    """Return a name for each of ``sides``: "prefill" and "decode", "group-0", "group-1", ..., or "engine" alone."""
    if deployment.decode is not None:
        return ("prefill", "decode")
    return tuple(f"group-{at}" for at in range(len(deployment.sides))) if deployment.groups else ("engine",)


def of_one_replica(deployment: Deployment) -> list[Deployment]:
    """Return each of ``sides``, as a deployment of one replica if it is a group: only the gateway knows all groups."""
    if not deployment.groups:
        return list(deployment.sides)
    return [replace(side, parallel=replace(side.parallel, replicas=1)) for side in deployment.sides]


def fits_node(deployment: Deployment) -> bool:
    """Return whether one replica fits one host: a node, or a part of one (``NodeSpec.gpus_per_host``)."""
    return replica_gpus(deployment) <= deployment.node.host_gpus


def visible_gpus(deployment: Deployment, replica: int) -> str:
    """Return the GPU indices of a replica on its host, separated by commas. Replicas fill one host after another."""
    gpus = min(replica_gpus(deployment), deployment.node.host_gpus)
    first = replica % (deployment.node.host_gpus // gpus) * gpus
    return ",".join(str(gpu) for gpu in range(first, first + gpus))


def environment_of(deployment: Deployment, device: str, replica: int) -> dict[str, str]:
    """Return the environment variable for a replica's GPUs ("cpu": none). Raises InputError for a wrong argument."""
    if device not in DEVICES:
        raise UnknownNameError("device", device, DEVICES)
    if not 0 <= replica < deployment.parallel.replicas:
        raise InputError(f"replica must be in 0..{deployment.parallel.replicas - 1}; it is {replica}")
    return {"CUDA_VISIBLE_DEVICES": visible_gpus(deployment, replica)} if device == "cuda" else {}


def policy_name(policy: Any) -> str:
    """Return a policy's name, with a mark if it is not built in, so that the name equals that of no built-in policy."""
    if isinstance(policy, str):
        return policy
    return str(policy.name) if policy.builtin else f"{policy.name} (your own)"


def flags(pairs: dict[str, Any]) -> tuple[str, ...]:
    """Return command-line arguments. A value True gives the flag alone. None and False leave the flag out."""
    shown = ((flag, value) for flag, value in pairs.items() if value is not None and value is not False)
    return tuple(word for flag, value in shown for word in ((flag,) if value is True else (flag, str(value))))


def sets_kv_blocks(deployment: Deployment) -> bool:
    """Return whether the number of KV blocks differs from the planned number, because the user set it."""
    from lengthwise import cost

    d = deployment
    try:
        sizes = d.model, d.gpu, d.parallel, d.limits, d.max_model_len, d.kv.planner
        planned = cost.plan_memory(*sizes, hybrid=d.kv.groups is not None)
    except DoesNotFitError:
        return True  # only a given number makes such a deployment possible
    return planned.num_blocks != d.kv.num_blocks


def memory_fraction(share: float, *, is_capped: bool, default: float = 0.0) -> float | None:
    """Return the engine's memory fraction for a simulated share of memory, or None if the engine's default holds it.

    If the engine also gets a cap in tokens (``is_capped``), the fraction is larger than the share, so that the cap
    decides the size of the KV cache: the engine takes the smaller of both, and its fraction applies to less memory.
    """
    fraction = min(share + FRACTION_ROOM if is_capped else share, MAX_FRACTION)
    return None if is_capped and fraction <= default else fraction


def memory_note(deployment: Deployment, engine: str, *, cap: str, share: str) -> str:
    """Return the note on the setting that sizes the KV cache: the cap, or the simulated share of memory."""
    if sets_kv_blocks(deployment):
        return f"{cap} caps the KV cache; {engine} takes less if the memory holds less, and logs it."
    return f"{share}; lower it if {engine} runs out of memory for other purposes."


def kv_dtype_flag(d: Deployment, names: Mapping[str, str]) -> str | None:
    """Return the engine's name of the KV cache's dtype by ``names``, or None for the default and an unknown dtype."""
    if d.limits.kv_dtype is None:
        return None
    wanted = dtype_name(d.limits.kv_dtype)
    same = wanted == dtype_name(d.limits.weight_dtype or d.model.dtype)
    return None if same and wanted in PLAIN else names.get(wanted)


def kv_tokens(deployment: Deployment) -> int:
    """Return the number of tokens that fit the KV cache of a replica, or of each of its data-parallel ranks."""
    return deployment.kv.kv_tokens(deployment.max_model_len)


def max_resident_seqs(deployment: Deployment) -> int:
    """Return how many sequences a replica runs at once: ``max_num_seqs``, or fewer if memory is reserved for each."""
    limit, longest = deployment.limits.max_num_seqs, deployment.max_model_len
    memory, kv = policy_name(deployment.scheduler.memory), deployment.kv
    if memory in ("reserve_max", "vidur_reserve_max"):
        blocks = -(-longest // kv.block_size) if memory == "reserve_max" else max(1, longest // kv.block_size)
        limit = min(limit, kv.num_blocks // blocks)
    return max(1, limit)


def chunks_prompts(deployment: Deployment) -> bool:
    """Return whether the simulated engine uses chunked prefill."""
    if (trtllm := deployment.scheduler.trtllm) is not None:
        return trtllm.enable_chunked_prefill
    if (sglang := deployment.scheduler.sglang) is not None:
        return sglang.chunked_prefill
    return policy_name(deployment.scheduler.batching) in {"unified", "chunked", "vidur_sarathi"}


def step_tokens(deployment: Deployment) -> int:
    """Return the token budget of a step. Without chunked prefill, vLLM's budget must hold the longest request."""
    budget = deployment.limits.max_num_batched_tokens
    return budget if splits_prompts(deployment) else max(budget, deployment.max_model_len)


def splits_prompts(deployment: Deployment) -> bool:
    """Return whether vLLM has to use chunked prefill to be nearest to the simulated engine.

    TensorRT-LLM's whole prompts share a budget that need not hold the longest request. With a raised budget, vLLM's
    steps could have many times as many tokens as the simulated ones; splitting a prompt changes them less.
    """
    return chunks_prompts(deployment) or deployment.scheduler.trtllm is not None


_INSTRUCT_MODEL = re.compile(r"[-_](instruct|chat|it)([-_]|$)", re.IGNORECASE)
PLAIN = ("float32", "float16", "bfloat16")
_CHECKPOINTS = {
    "fp8": "an FP8 checkpoint",
    "int8": "a W8A8 INT8 checkpoint",
    "int4": "an AWQ or GPTQ checkpoint of 4 bits",
    "fp4": "an NVFP4 or MXFP4 checkpoint",
}


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that the engine loads, with notes for the user."""

    model: str  # a Hugging Face id, a folder, or PLACEHOLDER
    dtype: str | None  # for ``--dtype``; None: the checkpoint's
    quantization: str | None  # for ``--quantization``; None: the checkpoint's
    notes: tuple[str, ...]


def checkpoint(deployment: Deployment, given: str | None, online: dict[str, str]) -> Checkpoint:
    """Return the checkpoint to serve: the given one, the catalog's, or PLACEHOLDER if there is none of this dtype.

    ``online`` maps dtypes to the value of ``--quantization`` with which the engine quantizes 16-bit weights on loading.
    """
    wanted = dtype_name(deployment.limits.weight_dtype or deployment.model.dtype)
    published = dtype_name(deployment.model.dtype)
    known, notes = (given, ()) if given else published_checkpoint(deployment.model)
    if wanted in PLAIN:
        if published not in PLAIN:
            notes += (f"The published weights are {published}; {wanted} needs a checkpoint of its own.",)
        return Checkpoint(known, wanted, None, notes)
    if given or wanted == published:
        note = f"Weights of {wanted} were simulated: the checkpoint must be {_CHECKPOINTS[wanted]}."
        return Checkpoint(known, None, None, (*notes, note))
    if wanted in online:
        note = (
            f"Weights of {wanted} were simulated: the engine quantises 16-bit weights while it loads them "
            f"(--quantization {online[wanted]}). For {_CHECKPOINTS[wanted]} set MODEL to it and drop the flag."
        )
        return Checkpoint(known, None, online[wanted], (*notes, note))
    note = f"Weights of {wanted} were simulated: set MODEL to {_CHECKPOINTS[wanted]} of {deployment.model.name}."
    return Checkpoint(PLACEHOLDER, None, None, (note,))


def published_checkpoint(model: ModelSpec) -> tuple[str, tuple[str, ...]]:
    """Return the id or folder of a model's weights by the catalog, or PLACEHOLDER if unknown, and notes for users."""
    if ids := [alias for alias in model.metadata.aliases if alias.count("/") == 1]:
        # Engines refuse chats with a base model, which has no chat template; the sort is stable.
        ids.sort(key=lambda one: not _INSTRUCT_MODEL.search(one))
        others = f" Its siblings have the same shapes: {', '.join(ids[1:])}." if ids[1:] else ""
        return ids[0], (f"{ids[0]} is loaded; another checkpoint of these shapes runs as fast.{others}",)
    if model.metadata.source.endswith("config.json") and "://" not in model.metadata.source:
        folder = Path(model.metadata.source).expanduser().absolute().parent
        return str(folder), ("The folder of config.json must also hold weights and a tokenizer.",)
    source = f" (shapes from {model.metadata.source})" if model.metadata.source else ""
    return PLACEHOLDER, (f"No published weights of {model.name} are known{source}: set MODEL.",)


_BY_REMAINING = (
    "Requests were ordered by predicted remaining output: send it, in tokens, as the field `priority`; it cannot "
    "change after a request is sent."
)
ORDERED_BY_PRIORITY = {
    "priority": "Requests were ordered by class: send it as the field `priority`, smaller first.",
    "sjf": "Requests were ordered by predicted output: send it, in tokens, as the field `priority`.",
    "srtf": _BY_REMAINING,
    "gittins": "Requests were ordered by the Gittins rank of their predicted length: send it, in tokens, as the "
    "field `priority`; it cannot change after a request is sent.",
    "longest_remaining": _BY_REMAINING,
    "ljf": "Requests were ordered by predicted output, longest first: send it negated as the field `priority`.",
    "shortest_prompt": "Requests were ordered by prompt length: send it, in tokens, as the field `priority`.",
}
"""Ranks that an engine follows if clients send the key as ``priority``."""

ARRIVAL = ("fcfs", "fcfs_preempted_first", "queue_order")

_PAGED = ("paged", "paged_by_chunk", "paged_strict")


STICKY = "consistent_hash"
STICKY_NOTE = (
    "Clients must send a session's name as the header X-Session-ID: its hash chooses the replica, not the load."
)


def router_policy(deployment: Deployment) -> str:
    """Return the policy of vLLM's router that is most like the simulated router."""
    name = policy_name(deployment.scheduler.router)
    router = resolve("router", deployment.scheduler.router)
    if router.uses("prefix_tokens"):
        return "cache_aware"
    if router.uses("previous_replica"):
        return STICKY
    return name if name in ("round_robin", "random") else "power_of_two"


_GATEWAY_ROUTERS = {
    "shortest_expected_delay": "earliest_finish",
    "least_work_left": "earliest_finish",
    "central": "earliest_finish",
    "prefix_precise": "prefix_approximate",
}


def gateway_router(deployment: Deployment) -> tuple[str, str]:
    """Return the router of lengthwise's gateway that is most like the simulated one, and a note on the difference."""
    name = policy_name(deployment.scheduler.router)
    nearest = "earliest_finish" if " " in name else _GATEWAY_ROUTERS.get(name, name.partition("(")[0])
    rule = "the gateway has the same" if nearest == name else f"the nearest of the gateway is {nearest}"
    if nearest == "earliest_finish":
        rule += ": the least predicted backlog in seconds, by speeds that it learns as engines serve, equal at first"
    return nearest, (
        f"All groups were behind a {name} router; {rule}. A request was simulated to join a replica when it arrives; "
        "the gateway holds it until an engine runs fewer than `concurrency` requests. vllm-router is no substitute: "
        "its policies count requests and ignore how fast an engine is."
    )


def gateway_toml(deployment: Deployment, urls: Mapping[str, Sequence[str]], *, host: str, admin_port: int) -> str:
    """Return the file of a lengthwise gateway in front of all groups. ``urls`` are those of each group's replicas."""
    router, note = gateway_router(deployment)
    parts = [
        comment(f"`lengthwise serve` routes by this file. {note}"),
        f'[listen]\nhost = "{host}"\nport = 8000\nadmin_port = {admin_port}',
        '[order]\nmode = "fcfs"',
        f'[dispatch]\nrouter = "{router}"',
    ]
    for (role, own), side in zip(urls.items(), deployment.sides, strict=True):
        running = min(max_resident_seqs(side), step_tokens(side))
        parts += [
            f'[[engines]]\nname = "{role}-{at}"\nurl = "{url}"\nconcurrency = {running}' for at, url in enumerate(own)
        ]
    return "\n\n".join(parts) + "\n"


def shared_notes(  # noqa: C901, PLR0912 - one note after the other
    d: Deployment, *, keeps_budget: bool = False, caps_chunks: bool = False, ranks: str = ""
) -> Iterator[str]:
    """Yield notes on the differences between simulation and engine that engines share.

    ``keeps_budget``: the command has the simulated token budget, even if prompts are not split. ``caps_chunks``: it has
    the simulated ``long_prefill_token_threshold``. ``ranks`` are the flags of a replica that spans hosts.
    """
    owner = "a rank" if d.parallel.dp > 1 else "a replica"
    if sets_kv_blocks(d):
        yield f"The KV cache was given as {d.kv.num_blocks:,} blocks ({kv_tokens(d):,} tokens) {owner}."
    else:
        planner = "" if d.kv.planner == "lengthwise" else f" by the rules of {d.kv.planner}"
        yield (
            f"{kv_tokens(d):,} tokens of KV cache {owner} were planned{planner}; the engine measures its own when it "
            "starts and logs them. Compare the two."
        )
    memory = policy_name(d.scheduler.memory)
    if memory in ("reserve_max", "vidur_reserve_max"):
        yield (
            "Memory for the longest sequence was reserved for each request. No engine does so; this one admits as many "
            f"sequences ({max_resident_seqs(d)}), and pages their memory."
        )
    elif memory == "predicted_peak":
        yield (
            "Requests were admitted by the predicted peak of KV tokens; the engine admits by what is free now and "
            "preempts later."
        )
    elif memory not in _PAGED:
        yield f"Memory policy {memory} has no counterpart; the engine pages on demand."
    if d.scheduler.reserve:
        yield (
            "Memory was reserved by predicted length. This command leaves the engine's own rule. Only vLLM has a "
            'plug-in that reserves so (--scheduler-cls, "reserve": true), behind a gateway that predicts.'
        )
    rank = resolve("rank", d.scheduler.rank)
    if rank.uses(*PREDICTION_ARGUMENTS):
        updates = " Updated predictions cannot reach a request that the engine already has."
        yield (
            f"Rank {rank.name} orders by predicted lengths, which no engine knows. A gateway can order requests so: it "
            "has the queue and passes an engine no more requests than run at once."
            + (updates if rank.uses("remaining_tokens", "gittins_rank") else "")
        )
    preemption = policy_name(d.scheduler.preemption)
    if preemption != "never":
        yield (
            f"By the preemption policy {preemption}, waiting requests preempted running ones. vLLM preempts only "
            "when a running request finds no memory. A gateway can end a stream after some tokens and request the rest "
            "later, with the tokens so far as part of the prompt."
        )
    if d.scheduler.binning is not None:
        yield (
            f"Arrivals were gathered by predicted length into batches of {d.limits.max_num_seqs} ("
            f"{policy_name(d.scheduler.binning)}). No engine does so; a gateway can gather them and pass on complete "
            "batches."
        )
    if not math.isinf(d.scheduler.max_wait_s):
        yield (
            f"Requests that had waited {d.scheduler.max_wait_s:g} s were scheduled before all others. An engine's "
            "priority cannot change after it receives a request: apply the bound where the queue is, in a gateway."
        )
    if d.scheduler.preemption_mode == "swap":
        yield "A preempted request's KV cache was swapped to the host; the engine computes it again."
    limit = d.limits.max_step_seqs
    if limit is not None and limit < d.limits.max_num_seqs:
        yield (
            f"At most {limit} of {d.limits.max_num_seqs} resident sequences took part in a step; the engine has one "
            "bound for both."
        )
    if (tokens := d.scheduler.long_prefill_token_threshold) and not caps_chunks:
        yield f"A step had at most {tokens} tokens of one prompt; only vLLM has such a limit."
    if not keeps_budget and step_tokens(d) != d.limits.max_num_batched_tokens:
        yield (
            f"Prompts were not split: the step's token budget is raised from {d.limits.max_num_batched_tokens} to "
            f"{step_tokens(d)}, the longest request."
        )
    if d.parallel.replicas > 1:
        name, nearest = policy_name(d.scheduler.router), router_policy(d)
        end = "" if name == nearest else f"; the nearest policy of vLLM's router is {nearest}"
        more = " A gateway can give all replicas one queue." if name == "central" else ""
        more = f" {STICKY_NOTE}" if nearest == STICKY else more
        yield f"{d.parallel.replicas} replicas were behind a {name} router{end}.{more}"
    if d.parallel.dp > 1 and (name := policy_name(d.scheduler.router)) != "vllm_internal":
        yield f"The router {name} chose the data-parallel rank of a request; an engine chooses it itself, by its load."
    yield from _host_notes(d, ranks)
    if not math.isinf(d.limits.timeout_s):
        yield (
            f"Clients gave up after {d.limits.timeout_s:g} s: set this in the client; the engine drops a request "
            "whose connection closes."
        )
    if not d.limits.enable_prefix_caching:
        yield "Prefix caching was not simulated and is turned off; turn it on if prompts begin alike."


def shares_node(d: Deployment) -> bool:
    """Return whether one node has all GPUs of a deployment, of both sides or of all groups."""
    return d.gpus <= d.node.host_gpus and len({(side.gpu.name, side.node.name) for side in d.sides}) == 1


def _host_notes(d: Deployment, ranks: str) -> Iterator[str]:
    if not fits_node(d):
        part = "nodes" if d.node.gpus_per_host is None else "hosts"
        yield (
            f"A replica of {replica_gpus(d)} GPUs spans {part} of {d.node.host_gpus}: the command must run on each "
            f"of them, with its rank.{f' Add {ranks}.' if ranks else ''}"
        )
    if not d.gpu.is_nvidia and not d.gpu.is_cpu:
        yield (
            f"The command and its container images are for NVIDIA GPUs, and {d.gpu.name} is not one: install the "
            "engine's build for it, and replace CUDA_VISIBLE_DEVICES. A Kubernetes manifest would need NVIDIA GPUs, so "
            "there is none."
        )


WIDTH = 100


def script(title: str, launch: Launch, body: str) -> str:
    """Return a script with the title and the notes as comments, then the body."""
    notes = "\n#\n".join(comment(note) for note in (title, *launch.notes))
    return f"#!/bin/sh\n{notes}\nset -eu\n\n{body}"


def comment(text: str) -> str:
    """Return a text as comment lines of at most WIDTH characters. Line breaks in the text become spaces."""
    words = " ".join(text.split())
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.wrap(words))


def default_model(model: str) -> str:
    """Return the shell line that sets ``MODEL`` to a default, or requires it if no checkpoint is known."""
    if model == PLACEHOLDER:
        return "MODEL=${MODEL:?set MODEL to a checkpoint: a Hugging Face id or a folder}\n"
    return f"MODEL=${{MODEL:-{shlex.quote(model)}}}\n"


def exports(environment: Mapping[str, str]) -> str:
    """Return shell lines that set and export these variables."""
    return "".join(f"{name}={shlex.quote(value)}\nexport {name}\n" for name, value in sorted(environment.items()))


def invocation(command: tuple[str, ...], replaced: Mapping[str, str], indent: str = "") -> str:
    """Return a quoted shell command, one flag per line. ``replaced`` maps a word to shell text for the next word."""
    lines: list[str] = []
    previous = ""
    for word in command:
        shown = replaced.get(previous) or shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(shown)
        else:
            lines[-1] += f" {shown}"
        previous = word
    return f" \\\n{indent}  ".join(lines)
