"""Where a Vidur profiling folder keeps what a deployment needs.

``compute/{device}/{model}/mlp.csv`` and ``attention.csv``, ``network/{device}/all_reduce.csv`` and
``send_recv.csv``, each possibly with ``.gz``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lengthwise.cost._vidur_rule import ALL_REDUCE, SEND_RECV
from lengthwise.schema.deployment import Parallelism
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.hardware import NodeSpec
from lengthwise.schema.model import ModelSpec


@dataclass(frozen=True)
class ProfileFiles:
    """The files that a deployment needs; ``attention`` are read as one."""

    mlp: Path
    attention: tuple[Path, ...]
    all_reduce: Path | None
    send_recv: Path | None

    def paths(self) -> list[Path]:
        """All of them, in a fixed order."""
        return [path for path in (self.mlp, *self.attention, self.all_reduce, self.send_recv) if path]


def find_files(
    folder: Path, model: ModelSpec, gpu_name: str, parallel: Parallelism, node: NodeSpec | None
) -> ProfileFiles:
    """The profile of a model on a GPU.

    A model's folder is called as the model or one of its aliases, with or without organisation; a
    device's is the start of the GPU's name; a network's is the node's name or one of its aliases.

    Raises:
        ProfileError: Something is missing; the message lists what is there.
    """
    if not folder.is_dir():
        raise ProfileError(
            f"a Vidur profile must be a folder with compute/ and network/; {folder} is not one"
        )
    device = device_folder(folder, gpu_name)
    place = model_folder(device, model)
    mlp = csv_file(place, "mlp")
    attention = attention_files(place)
    if not attention:
        raise ProfileError(
            f"{place} must hold attention.csv; it holds {_names(place)}. Add a measured one, or use the "
            "roofline (cost = 'roofline')."
        )
    network = None
    if parallel.tp * parallel.pp > 1:
        network = network_folder(folder, device.name, node)
    return ProfileFiles(
        mlp,
        attention,
        csv_file(network, ALL_REDUCE) if network and parallel.tp > 1 else None,
        csv_file(network, SEND_RECV) if network and parallel.pp > 1 else None,
    )


def attention_files(place: Path) -> tuple[Path, ...]:
    """A model's attention.csv, or the parts that it was cut into; none where there is none."""
    if has_csv(place, "attention"):
        return (csv_file(place, "attention"),)
    return tuple(sorted(place.glob("attention_*.csv*")))


def device_folder(folder: Path, gpu_name: str) -> Path:
    """The folder under compute/ whose name a GPU's name starts with; raises ProfileError."""
    compute = folder / "compute"
    there = sorted(path for path in compute.glob("*") if path.is_dir())
    name = _plain(gpu_name)
    fitting = [path for path in there if name.startswith(_plain(path.name))]
    shown = ", ".join(path.name for path in there) or "none"
    if not fitting:
        inside = folder.name == "compute" and not compute.exists()
        hint = f". Give the folder that holds compute/, which is {folder.parent}" if inside else ""
        raise ProfileError(f"{compute} must hold a folder for {gpu_name}; it holds {shown}{hint}")
    return max(fitting, key=lambda path: len(path.name))


def model_folder(device: Path, model: ModelSpec) -> Path:
    """The folder of a model by its name or an alias; raises ProfileError."""
    there = sorted({path.parent for path in device.rglob("mlp.csv*")})
    names = {name.lower() for name in (model.name, *model.facts.aliases)}
    names |= {name.rpartition("/")[2] for name in names}
    for path in there:
        if names & {path.name.lower(), path.relative_to(device).as_posix().lower()}:
            return path
    shown = ", ".join(path.relative_to(device).as_posix() for path in there) or "none"
    raise ProfileError(f"{device} must hold a folder for {model.name} with mlp.csv; it holds {shown}")


def network_folder(folder: Path, device: str, node: NodeSpec | None) -> Path:
    """The folder of a node, or else of the device's pairwise NVLink or its DGX; raises ProfileError."""
    network = folder / "network"
    there = sorted(path for path in network.glob("*") if path.is_dir())
    names = [node.name, *node.aliases] if node else [f"{device}_pairwise_nvlink", f"{device}_dgx"]
    for name in names:
        for path in there:
            if _plain(path.name) == _plain(name):
                return path
    shown = ", ".join(path.name for path in there) or "none"
    raise ProfileError(f"{network} must hold a folder for the node {names[0]}; it holds {shown}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def csv_file(folder: Path, name: str) -> Path:
    """The file of that name, packed or not; raises ProfileError."""
    for ending in (".csv", ".csv.gz"):
        path = folder / f"{name}{ending}"
        if path.is_file():
            return path
    raise ProfileError(f"{folder} must hold {name}.csv; it holds {_names(folder)}")


def has_csv(folder: Path, name: str) -> bool:
    """Whether there is such a file, packed or not."""
    return any((folder / f"{name}{ending}").is_file() for ending in (".csv", ".csv.gz"))


def _names(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
