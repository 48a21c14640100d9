"""What starts a replica: the plan's own command, or the user's."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lengthwise.apps._fields import require_one_answer
from lengthwise.backend import Launch, vllm_launch
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, UnknownNameError

PLACES = ("weights", "name", "host", "port", "tp", "pp", "gpus", "max_model_len")


@dataclass(frozen=True)
class Loaded:
    """What an engine of a model loads, and how it is started and asked.

    Attributes:
        name: As the application calls it.
        weights: A Hugging Face id or a folder; None: what the catalog knows of the plan's model.
        served: The name that requests ask for; "": the first that the engine lists.
        command: A command of one's own with ``{weights}``, ``{port}`` and the other PLACES; "": vLLM's for the plan.
        environment: Variables on top of this process' own.
        seats: Requests under way at once in a replica, where the plan's deployment does not say.
        max_model_len: For the command.
        sleeps: Whether its engines have ``/sleep`` and ``/wake_up``: vLLM in development mode, on CUDA, ROCm, XPU. Its
            CPU build takes ``--enable-sleep-mode`` and then refuses to start ("Sleep mode is not supported on current
            platform", 0.32): leave it out there, and engines are started anew. So are those whose ``/sleep`` fails.
        body: Fields of every request besides its own.
    """

    name: str
    weights: str | None = None
    served: str = ""
    command: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    seats: int = 256
    max_model_len: int | None = None
    sleeps: bool = False
    body: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seats < 1:
            raise InputError(f"seats of {self.name} must be at least 1; it is {self.seats}")
        require_one_answer(self.body, "body")
        if self.command:
            _filled(self, ModelPlan(0, ""), (0,), "127.0.0.1", 1)


Deployed = Callable[[ModelPlan], Deployment]


def launch_of(
    loaded: Loaded, plan: ModelPlan, gpus: Replica, host: str, port: int, deployed: Deployed | None
) -> Launch:
    """The command of one replica that listens at a port, on GPUs by their number in its machine.

    Args:
        loaded: The model's.
        plan: The replica's.
        gpus: The replica's, as ``CUDA_VISIBLE_DEVICES`` counts them.
        host: Address to listen at.
        port: Where to listen.
        deployed: What was planned, for vLLM's command.

    Raises:
        InputError: There is neither a command nor a deployment.
    """
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), **loaded.environment}
    if loaded.command:
        return Launch(_filled(loaded, plan, gpus, host, port), seen)
    if deployed is None:
        raise InputError(f"{loaded.name} must have a command that starts its engine, or be planned with one")
    launch = vllm_launch(
        deployed(plan), model=loaded.weights, served_name=loaded.served or None, host=host, port=port
    )
    words = (*launch.command, "--enable-sleep-mode") if loaded.sleeps else launch.command
    mode = {"VLLM_SERVER_DEV_MODE": "1"} if loaded.sleeps else {}
    return Launch(words, {**launch.environment, **mode, **seen}, launch.notes)


def seats_of(loaded: Loaded, plan: ModelPlan, deployed: Deployed | None) -> int:
    """Requests under way at once in one replica."""
    if loaded.command or deployed is None:
        return loaded.seats
    return deployed(plan).limits.max_num_seqs


def _filled(loaded: Loaded, plan: ModelPlan, gpus: Sequence[int], host: str, port: int) -> tuple[str, ...]:
    values = {
        "weights": loaded.weights or loaded.name,
        "name": loaded.served or loaded.name,
        "host": host,
        "port": port,
        "tp": plan.tp,
        "pp": plan.pp,
        "gpus": ",".join(map(str, gpus)),
        "max_model_len": loaded.max_model_len or "",
    }
    try:
        return tuple(word.format(**values) for word in shlex.split(loaded.command))
    except KeyError as error:
        raise UnknownNameError(f"place in the command of {loaded.name}", str(error.args[0]), PLACES) from None
    except (ValueError, IndexError) as error:
        raise InputError(
            f"the command of {loaded.name} cannot be read ({error}); places are written {{port}}, braces {{{{ }}}}: "
            f"{loaded.command!r}"
        ) from None


__all__ = ["PLACES", "Deployed", "Loaded", "launch_of", "seats_of"]
