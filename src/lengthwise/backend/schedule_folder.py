"""A folder with all that one needs to run a schedule, and what starts its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthwise.backend._scripts import PORT, server_script
from lengthwise.backend._split_scripts import (
    DECODE_CHANNEL,
    DECODE_PORT,
    ENCODE_CHANNEL,
    ENCODE_PORT,
    side_script,
    split_router_script,
)
from lengthwise.backend.launch import Launch
from lengthwise.backend.scheduled import phased_launch, split_launches
from lengthwise.backend.vllm import vllm_launch
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import OutputError
from lengthwise.schema.files import write_whole

PLAN = "PLAN.json"


@dataclass(frozen=True)
class ScheduledEngines:
    """The engines of a schedule.

    Attributes:
        title: The schedule in words.
        encode: The engine that encodes; of phases the one that does all.
        decode: The engine that decodes; None: the same.
        pairs: Such pairs side by side.
        phases: What vLLM's scheduler is told, where it can keep phases itself; empty: nothing.
    """

    title: str
    encode: Deployment
    decode: Deployment | None = None
    pairs: int = 1
    phases: Mapping[str, Any] = field(default_factory=dict)


def scheduled_scripts(engines: ScheduledEngines) -> dict[str, str]:
    """Shell scripts by file name."""
    device = "cpu" if engines.encode.gpu.name.startswith("CPU") else "cuda"
    if engines.decode is not None:
        return _split(engines, engines.decode, device)
    plain = vllm_launch(engines.encode, device=device)
    scripts = {"vllm.sh": _server(f"{engines.title}, phases kept by the gateway before it.", plain, engines)}
    if engines.phases:
        launch = phased_launch(engines.encode, engines.phases, device=device)
        scripts["vllm-phases.sh"] = _server(f"{engines.title}, phases kept inside vLLM.", launch, engines)
    return scripts


def require_new(folder: Path, *, force: bool) -> None:
    """Nothing, if files may be put there.

    Raises:
        OutputError: The folder has files already, which only ``force`` lets be replaced.
    """
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"{folder} has files already; name another folder, or replace them with --force")


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """The files in a folder, which is made if it is absent, each whole; returns their paths.

    Raises:
        OutputError: One cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error.strerror}") from error
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
        (folder / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    return [folder / name for name in texts]


def _server(title: str, launch: Launch, engines: ScheduledEngines) -> str:
    return server_script(title, launch, _model(launch), engines.encode)


def _split(engines: ScheduledEngines, decode: Deployment, device: str) -> dict[str, str]:
    first, second = split_launches(engines.encode, decode, device=device)
    one, other = engines.encode.parallel.gpus, decode.parallel.gpus
    here = min(engines.pairs, engines.encode.node.gpus // (one + other))
    starts = range(0, here * (one + other), one + other)
    encoding = [_visible(start, one) for start in starts]
    decoding = [_visible(start + one, other) for start in starts]
    more = (
        "" if here == engines.pairs else f" Run it on each node: one holds {here} of {engines.pairs} pairs."
    )
    return {
        "prefill.sh": side_script(
            f"{engines.title}: encodes.{more}", first, _model(first), encoding, ENCODE_PORT, ENCODE_CHANNEL
        ),
        "decode.sh": side_script(
            f"{engines.title}: decodes.{more}", second, _model(second), decoding, DECODE_PORT, DECODE_CHANNEL
        ),
        "router.sh": split_router_script(here),
    }


def _model(launch: Launch) -> str:
    return launch.command[launch.command.index("serve") + 1]


def _visible(start: int, gpus: int) -> str:
    return ",".join(map(str, range(start, start + gpus)))


def listed(items: Sequence[str]) -> str:
    """Lines of a list."""
    return "\n".join(f"- {' '.join(item.split())}" for item in items)


__all__ = ["PLAN", "PORT", "ScheduledEngines", "listed", "require_new", "scheduled_scripts", "write_texts"]
