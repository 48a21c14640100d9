"""What one runs for real: a command, its environment, and what it does not do as simulated."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthwise.policy import PREDICTED, resolve
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import ModelSpec, dtype_name

DEVICES = ("cuda", "cpu")
PLACEHOLDER = "$MODEL"
"""Stands in a command for a checkpoint that the catalog does not name."""


@dataclass(frozen=True)
class Launch:
    """A command line with what must be known of it.

    Attributes:
        command: The program and its arguments, unquoted.
        environment: Variables to set for it.
        notes: Where the real program differs from what was simulated, a sentence or two each.
    """

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def replica_gpus(deployment: Deployment) -> int:
    """GPUs of one replica."""
    return deployment.parallel.tp * deployment.parallel.pp


def fits_node(deployment: Deployment) -> bool:
    """Whether one replica fits one node."""
    return replica_gpus(deployment) <= deployment.node.gpus


def visible_gpus(deployment: Deployment, replica: int) -> str:
    """The GPU indices of a replica on its node, comma-separated; a node is filled before the next."""
    gpus = min(replica_gpus(deployment), deployment.node.gpus)
    first = replica % (deployment.node.gpus // gpus) * gpus
    return ",".join(str(gpu) for gpu in range(first, first + gpus))


def environment_of(deployment: Deployment, device: str, replica: int) -> dict[str, str]:
    """Which devices the replica sees; checks both arguments.

    Raises:
        UnknownNameError: There is no such device.
        InputError: There is no such replica.
    """
    if device not in DEVICES:
        raise UnknownNameError("device", device, DEVICES)
    if not 0 <= replica < deployment.parallel.replicas:
        raise InputError(f"replica must be in 0..{deployment.parallel.replicas - 1}; it is {replica}")
    return {"CUDA_VISIBLE_DEVICES": visible_gpus(deployment, replica)} if device == "cuda" else {}


def policy_name(policy: Any) -> str:
    """A policy's name; one that is not built in says so, since no engine can know it."""
    if isinstance(policy, str):
        return policy
    return str(policy.name) if policy.builtin else f"{policy.name} (your own)"


def flags(pairs: dict[str, Any]) -> tuple[str, ...]:
    """Arguments from flags and values: True stands alone, None and False are left out."""
    shown = ((flag, value) for flag, value in pairs.items() if value is not None and value is not False)
    return tuple(word for flag, value in shown for word in ((flag,) if value is True else (flag, str(value))))


def is_overridden(deployment: Deployment) -> bool:
    """Whether the number of KV blocks was given rather than planned."""
    from lengthwise import cost
    from lengthwise.schema.errors import DoesNotFitError

    d = deployment
    try:
        planned = cost.plan_memory(d.model, d.gpu, d.parallel, d.limits, d.max_model_len, d.kv.planner)
    except DoesNotFitError:
        return True  # only a given number lets such a deployment be made
    return planned.num_blocks != d.kv.num_blocks


def kv_tokens(deployment: Deployment) -> int:
    """Tokens that the KV cache of a replica holds."""
    return deployment.kv.num_blocks * deployment.kv.block_size


def resident_bound(deployment: Deployment) -> int:
    """Sequences that may be resident: reserving the maximum for each leaves room for so many."""
    most = deployment.limits.max_num_seqs
    memory, kv = policy_name(deployment.scheduler.memory), deployment.kv
    if memory == "reserve_max":
        most = min(most, kv.num_blocks // -(-deployment.max_model_len // kv.block_size))
    elif memory == "vidur_reserve_max":
        most = min(most, kv.num_blocks // max(1, deployment.max_model_len // kv.block_size))
    return max(1, most)


def cuts_prompts(deployment: Deployment) -> bool:
    """Whether the simulated steps cut prompts into chunks."""
    return policy_name(deployment.scheduler.batching) in {"unified", "chunked", "vidur_sarathi"}


def step_tokens(deployment: Deployment) -> int:
    """The token budget of a step; where prompts stay whole it must hold the longest one."""
    budget = deployment.limits.max_num_batched_tokens
    return budget if cuts_prompts(deployment) else max(budget, deployment.max_model_len)


_INSTRUCTED = re.compile(r"[-_](instruct|chat|it)([-_]|$)", re.IGNORECASE)
PLAIN = ("float32", "float16", "bfloat16")
_CHECKPOINTS = {
    "fp8": "an FP8 checkpoint",
    "int8": "a W8A8 INT8 checkpoint",
    "int4": "an AWQ or GPTQ checkpoint of 4 bits",
    "fp4": "an NVFP4 or MXFP4 checkpoint",
}


@dataclass(frozen=True)
class Checkpoint:
    """What is loaded.

    Attributes:
        model: A Hugging Face id, a folder, or PLACEHOLDER.
        dtype: For ``--dtype``; None leaves it to the checkpoint.
        quantization: For ``--quantization``; None leaves it to the checkpoint.
        notes: What must be known of it.
    """

    model: str
    dtype: str | None
    quantization: str | None
    notes: tuple[str, ...]


def checkpoint(deployment: Deployment, given: str | None, online: dict[str, str]) -> Checkpoint:
    """The checkpoint that was simulated, or the one that was given.

    Args:
        deployment: What was simulated.
        given: A checkpoint to load instead; what it is quantised to is then its own affair.
        online: What the engine quantises to while it loads 16-bit weights, by dtype.
    """
    wanted = dtype_name(deployment.limits.weight_dtype or deployment.model.dtype)
    published = dtype_name(deployment.model.dtype)
    known, notes = (given, ()) if given else published_checkpoint(deployment.model)
    if wanted in PLAIN:
        if published not in PLAIN:
            notes += (f"The published weights are {published}; {wanted} needs a checkpoint of its own.",)
        return Checkpoint(known, wanted, None, notes)
    if given or wanted == published:
        return Checkpoint(known, None, None, (*notes, _simulated(wanted)))
    if wanted in online:
        return Checkpoint(known, None, online[wanted], (*notes, _online(wanted, online[wanted])))
    need = f"Weights of {wanted} were simulated: set MODEL to {_CHECKPOINTS[wanted]} of {deployment.model.name}."
    return Checkpoint(PLACEHOLDER, None, None, (need,))


def published_checkpoint(model: ModelSpec) -> tuple[str, tuple[str, ...]]:
    """Where a model's weights are, as far as the catalog knows, and what must be known of them.

    Of checkpoints of the same shapes one that follows instructions goes first: engines refuse chats with a base model,
    which has no chat template.
    """
    if ids := [alias for alias in model.metadata.aliases if alias.count("/") == 1]:
        ids.sort(key=lambda one: not _INSTRUCTED.search(one))  # stable: else as the catalog has them
        others = f" Its siblings have the same shapes: {', '.join(ids[1:])}." if ids[1:] else ""
        return ids[0], (f"{ids[0]} is loaded; another checkpoint of these shapes runs as fast.{others}",)
    if model.metadata.source.endswith("config.json") and "://" not in model.metadata.source:
        folder = Path(model.metadata.source).expanduser().absolute().parent
        return str(folder), ("The folder of config.json must also hold weights and a tokenizer.",)
    source = f" (shapes from {model.metadata.source})" if model.metadata.source else ""
    return PLACEHOLDER, (f"No published weights of {model.name} are known{source}: set MODEL.",)


def _simulated(desired: str) -> str:
    return f"Weights of {desired} were simulated: the checkpoint must be {_CHECKPOINTS[desired]}."


def _online(desired: str, method: str) -> str:
    return (
        f"Weights of {desired} were simulated: the engine quantises 16-bit weights while it loads them "
        f"(--quantization {method}). For {_CHECKPOINTS[desired]} set MODEL to it and drop the flag."
    )


ORDERED_BY_PRIORITY = {
    "priority": "Requests went by their class: send it as the field `priority`, smaller first.",
    "sjf": "Requests went by predicted output: send it, in tokens, as the field `priority`.",
    "srtf": "Requests went by the predicted output that remained: send the prediction, in tokens, as the "
    "field `priority`; it cannot change once a request is sent.",
    "gittins": "Requests went by the Gittins index of their predicted length: send it, in tokens, as the field "
    "`priority`; it cannot change once a request is sent.",
    "longest_remaining": "Requests went by the predicted output that remained: send the prediction, in "
    "tokens, as the field `priority`; it cannot change once a request is sent.",
    "ljf": "Requests went by predicted output, longest first: send it negated as the field `priority`.",
    "shortest_prompt": "Requests went by prompt length: send it, in tokens, as the field `priority`.",
}
"""Ranks that an engine follows if whoever sends the requests tells it the key."""

ARRIVAL = ("fcfs", "fcfs_evicted_first")

_MEMORIES = {
    "reserve_max": "Memory for the longest sequence was reserved for each request. No engine does so; as many "
    "sequences are let in ({bound}), and their memory is paged.",
    "vidur_reserve_max": "Memory for the longest sequence was reserved for each request. No engine does so; as "
    "many sequences are let in ({bound}), and their memory is paged.",
    "predicted_peak": "Requests were admitted by the predicted peak of KV tokens; the engine admits by what is "
    "free now and evicts later.",
}
_PAGED = ("paged", "paged_by_chunk", "paged_strict")
_ROUTERS = {
    "round_robin": "round_robin",
    "random": "random",
    "power_of_two": "power_of_two",
    "least_outstanding": "power_of_two",
    "least_waiting": "power_of_two",
    "least_tokens": "power_of_two",
    "central": "power_of_two",
}


def router_policy(deployment: Deployment) -> str:
    """The policy of vLLM's router that stands nearest to the simulated one."""
    return _ROUTERS.get(policy_name(deployment.scheduler.router), "power_of_two")


def shared_notes(deployment: Deployment) -> tuple[str, ...]:
    """What differs whichever engine runs: memory, eviction, steps, replicas, clients, caches."""
    found = (
        _blocks,
        _memory,
        _by_length,
        _preemption,
        _binning,
        _max_wait,
        _preempt,
        _step,
        _budget,
        _replicas,
        _nodes,
        _timeout,
    )
    made = (note(deployment) for note in found)
    return (
        *tuple(note for note in made if note),
        "Prefix caching was not simulated and is turned off; turning it on can only help.",
    )


def _blocks(d: Deployment) -> str | None:
    if is_overridden(d):
        return f"The KV cache was given as {d.kv.num_blocks:,} blocks ({kv_tokens(d):,} tokens) a replica."
    how = "" if d.kv.planner == "lengthwise" else f" by the rules of {d.kv.planner}"
    return (
        f"{kv_tokens(d):,} tokens of KV cache a replica were planned{how}; the engine measures its own when it "
        "starts and logs them. Compare the two."
    )


def _memory(d: Deployment) -> str | None:
    name = policy_name(d.scheduler.memory)
    if name in _PAGED:
        return None
    text = _MEMORIES.get(name, f"Memory policy {name} has no counterpart; the engine pages on demand.")
    return text.format(bound=resident_bound(d))


def _by_length(d: Deployment) -> str | None:
    rank = resolve("rank", d.scheduler.rank)
    if not rank.uses(*PREDICTED):
        return None
    again = " Predictions made again as tokens come cannot reach a request that the engine holds."
    return (
        f"Rank {rank.name} goes by predicted lengths, which no engine knows. A gateway orders exactly so: it keeps the "
        "queue and passes an engine no more requests than run at once."
        + (again if rank.uses("remaining_tokens", "index_tokens") else "")
    )


def _preemption(d: Deployment) -> str | None:
    name = policy_name(d.scheduler.preemption)
    if name == "never":
        return None
    return (
        f"By the preemption policy {name}, waiting requests preempted running ones. vLLM evicts only when a running "
        "request finds no memory; a gateway can cut a stream after some tokens and ask for the rest later, with what "
        "the request has produced as its prompt."
    )


def _binning(d: Deployment) -> str | None:
    if d.scheduler.binning is None:
        return None
    return (
        f"Arrivals were gathered by predicted length into batches of {d.limits.max_num_seqs} ("
        f"{policy_name(d.scheduler.binning)}). No engine does so; a gateway gathers them and passes whole batches on."
    )


def _max_wait(d: Deployment) -> str | None:
    if math.isinf(d.scheduler.max_wait_s):
        return None
    return (
        f"Who had waited {d.scheduler.max_wait_s:g} s went before all others. An engine's priority cannot change once "
        "a request is with it: keep the bound where the queue is, in a gateway."
    )


def _preempt(d: Deployment) -> str | None:
    if d.scheduler.preemption_mode != "swap":
        return None
    return "An evicted request's KV cache was swapped to the host; the engine computes it again."


def _step(d: Deployment) -> str | None:
    limit = d.limits.max_step_seqs
    if limit is None or limit >= d.limits.max_num_seqs:
        return None
    return (
        f"At most {limit} of {d.limits.max_num_seqs} resident sequences took part in a step; the engine has one "
        "bound for both."
    )


def _budget(d: Deployment) -> str | None:
    if cuts_prompts(d) or step_tokens(d) == d.limits.max_num_batched_tokens:
        return None
    return (
        f"Prompts stayed whole: the step's token budget is raised from {d.limits.max_num_batched_tokens} to "
        f"{step_tokens(d)}, the longest request."
    )


def _replicas(d: Deployment) -> str | None:
    if d.parallel.replicas == 1:
        return None
    name, near = policy_name(d.scheduler.router), router_policy(d)
    end = "" if name == near else f"; {near} stands nearest in vLLM's router"
    queue = " A queue shared by all replicas is a gateway's work." if name == "central" else ""
    return f"{d.parallel.replicas} replicas stood behind a {name} router{end}.{queue}"


def _nodes(d: Deployment) -> str | None:
    if fits_node(d):
        return None
    return (
        f"A replica of {d.parallel.tp * d.parallel.pp} GPUs spans nodes of {d.node.gpus}: the command must run on "
        "each of them and be told so."
    )


def _timeout(d: Deployment) -> str | None:
    if math.isinf(d.limits.timeout_s):
        return None
    return (
        f"Clients gave up after {d.limits.timeout_s:g} s: set this in the client; the engine drops a request "
        "whose connection closes."
    )


WIDTH = 100


def script(title: str, launch: Launch, body: str) -> str:
    """A whole script: the title and the notes as comments, then the body."""
    said = "\n#\n".join(comment(note) for note in (title, *launch.notes))
    return f"#!/bin/sh\n{said}\nset -eu\n\n{body}"


def comment(text: str) -> str:
    """Text as comment lines. A line break in it cannot end the comment."""
    words = " ".join(text.split())
    # Names and addresses stay whole, as long as they are.
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.wrap(words))


def default_model(model: str) -> str:
    """The line that lets ``MODEL`` be set from outside, and says so where nothing is known."""
    if model == PLACEHOLDER:
        return "MODEL=${MODEL:?set MODEL to a checkpoint: a Hugging Face id or a folder}\n"
    return f"MODEL=${{MODEL:-{shlex.quote(model)}}}\n"


def exports(environment: Mapping[str, str]) -> str:
    """Lines that set and export variables, by name."""
    return "".join(f"{name}={shlex.quote(value)}\nexport {name}\n" for name, value in sorted(environment.items()))


def invocation(command: tuple[str, ...], replaced: Mapping[str, str], indent: str = "") -> str:
    """The command, quoted, one line a flag.

    Args:
        command: The words of the command.
        replaced: Shell text for the word after this one; written as it is.
        indent: Before every line.
    """
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
