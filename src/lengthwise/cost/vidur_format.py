"""Vidur's rule: from its operators' milliseconds a layer to cost tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lengthwise.cost.provenance import read_npz
from lengthwise.schema.cost_tables import MERGED, AttentionRule, CostTables, Floats, Ints
from lengthwise.schema.deployment import Parallelism
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.specs import ModelSpec, NodeSpec

ROUND_TOKENS = 8
CONTEXT_STEP_TOKENS = 64
ALL_REDUCE_LAUNCH_MS = 0.02
MERGE_OVERHEAD = 0.1
HIGHEST_BATCH = 128
VIDUR_TOKENS = 4096
"""Largest step, chunk and context that Vidur's prediction tables cover by default."""

ONCE_A_LAYER = (
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "input_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
CACHE_SAVE = "attn_kv_cache_save"
SECOND_NORM = "post_attention_layernorm"
ALL_REDUCE, SEND_RECV = "all_reduce", "send_recv"
PREFILL, DECODE = "attn_prefill", "attn_decode"


def vidur_tables(npz_path: Path | str, model: ModelSpec, pp: int = 1) -> CostTables:
    """Cost tables from Vidur's complete prediction tables (milliseconds a layer, one array an operator).

    Args:
        npz_path: An npz of ``attn_pre_proj``, ``mlp_up_proj`` ... [T+1], ``attn_prefill``
            [context / 64, chunk], ``attn_decode`` [sequences, context / 64], and ``all_reduce``
            when they were made for more than one GPU.
        model: Gives the layers and whether attention is grouped.
        pp: Pipeline stages; every stage gets as many layers.

    Raises:
        ProfileError: The file cannot be read, lacks an operator, or ``pp`` does not divide the layers.
    """
    ops = {name: array.astype(np.float64) for name, array in read_npz(npz_path).items()}
    return compose(ops, model, equal_stages(model, pp), f"vidur tables {Path(npz_path).name}")


def equal_stages(model: ModelSpec, pp: int) -> Ints:
    """[pp] the same number of layers a stage, as Vidur demands."""
    if pp < 1 or model.layers % pp:
        raise ProfileError(f"pp must divide the {model.layers} layers of {model.name} for Vidur's rule; it is {pp}")
    return np.full(pp, model.layers // pp, dtype=np.int64)


def compose(ops: Mapping[str, Floats], model: ModelSpec, stage_layers: Ints, source: str) -> CostTables:
    """Cost tables that, read by the MERGED rule, give Vidur's stage times.

    All operators but the cache write are read at the step's tokens rounded up to 8; the
    all-reduce gets 0.02 ms of launch and is paid twice a layer; embedding, final norm, LM head,
    sampling and host are free, since Vidur counts none of them.

    Args:
        ops: Milliseconds by operator: [T+1] by tokens for the one-dimensional ones,
            ``attn_prefill`` [context / 64, chunk] and ``attn_decode`` [sequences, context / 64].
            Entry 0 of a tokens axis means nothing and is taken as 0.
        model: Tells whether several queries share a KV head (merging then costs 10 % more).
        stage_layers: [PP] layers of each stage; more than one needs ``send_recv``.
        source: Where the numbers come from, for people.

    Raises:
        ProfileError: An operator that the deployment needs is missing.
    """
    needed = [*ONCE_A_LAYER, PREFILL, DECODE] + [SEND_RECV] * (len(stage_layers) > 1)
    missing = [name for name in needed if name not in ops]
    if missing:
        raise ProfileError(f"{source} must hold {', '.join(missing)}; it holds {', '.join(sorted(ops))}")
    tokens = np.arange(len(ops[ONCE_A_LAYER[0]]))
    rounded = np.minimum(-(-tokens // ROUND_TOKENS) * ROUND_TOKENS, tokens[-1])
    names = [*ONCE_A_LAYER] + [SECOND_NORM] * (SECOND_NORM in ops)
    layer_ms = np.sum([ops[name][rounded] for name in names], axis=0)
    layer_ms += ops.get(CACHE_SAVE, np.zeros(len(tokens)))
    return CostTables(
        layer_s=_seconds(layer_ms),
        comm_s=_seconds(_comm_ms(ops, rounded)),
        first_s=np.zeros(len(tokens)),
        send_s=_seconds(ops[SEND_RECV][rounded] if SEND_RECV in ops else np.zeros(len(tokens))),
        head_s=np.zeros(HIGHEST_BATCH + 1),
        host_s=np.zeros(HIGHEST_BATCH + 1),
        prefill_s=_seconds(np.ascontiguousarray(ops[PREFILL].T)),
        decode_s=_seconds(ops[DECODE]),
        stage_layers=stage_layers,
        rule=AttentionRule(MERGED, CONTEXT_STEP_TOKENS, merge_factor(model)),
        source=source,
    )


def merge_factor(model: ModelSpec) -> float:
    """What merging several requests into one multiplies attention by: 1.1 with GQA, else 1."""
    return 1.0 + MERGE_OVERHEAD if model.attention.is_gqa else 1.0


def _comm_ms(ops: Mapping[str, Floats], rounded: Ints) -> Floats:
    if ALL_REDUCE not in ops:
        return np.zeros(len(rounded))
    return 2.0 * (ops[ALL_REDUCE][rounded] + ALL_REDUCE_LAUNCH_MS)


def _seconds(milliseconds: Floats) -> Floats:
    """[n, ...] seconds, with 0 for no tokens."""
    seconds = np.asarray(milliseconds, dtype=np.float64) / 1000.0
    seconds[0] = 0.0
    return seconds


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
        raise ProfileError(f"a Vidur profile must be a folder with compute/ and network/; {folder} is not one")
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
    names = {name.lower() for name in (model.name, *model.metadata.aliases)}
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
