"""Vidur's file layout, and its rule that combines operators' milliseconds per layer into cost tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lengthwise.cost.provenance import read_npz
from lengthwise.schema.cost_tables import MERGED, AttentionRule, CostEvidence, CostTables, Floats, Ints
from lengthwise.schema.deployment import Parallelism
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.specs import ModelSpec, NodeSpec

ROUND_TOKENS = 8  # tokens of a step are rounded up to a multiple of it
CONTEXT_STEP_TOKENS = 64  # contexts are rounded up to a multiple of it
ALL_REDUCE_LAUNCH_MS = 0.02
MERGE_OVERHEAD = 0.1  # of attention over several requests, with GQA
HIGHEST_BATCH = 128  # largest batch of Vidur's prediction tables
VIDUR_TOKENS = 4096  # largest step, chunk and context that Vidur's prediction tables cover by default

ONCE_A_LAYER = (
    "attn_pre_proj", "attn_rope", "attn_post_proj", "input_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip
CACHE_SAVE = "attn_kv_cache_save"
SECOND_NORM = "post_attention_layernorm"
ALL_REDUCE, SEND_RECV = "all_reduce", "send_recv"
PREFILL, DECODE = "attn_prefill", "attn_decode"


def vidur_tables(npz_path: Path | str, model: ModelSpec, pp: int = 1) -> CostTables:
    """Read cost tables from Vidur's prediction tables, the milliseconds of each operator in a layer.

    The npz holds ``attn_pre_proj``, ``mlp_up_proj`` ... [T+1], ``attn_prefill`` [context / 64, chunk], ``attn_decode``
    [sequences, context / 64], and ``all_reduce`` if made for more than one GPU.
    """
    ops = {name: array.astype(np.float64) for name, array in read_npz(npz_path).items()}
    return compose(ops, model, equal_stages(model, pp), f"vidur tables {Path(npz_path).name}")


def equal_stages(model: ModelSpec, pp: int) -> Ints:
    """Return the equal number of layers of each stage ([pp]). Raises ProfileError if ``pp`` is no divisor."""
    if pp < 1 or model.layers % pp:
        raise ProfileError(f"pp must divide the {model.layers} layers of {model.name} for Vidur's rule; it is {pp}")
    return np.full(pp, model.layers // pp, dtype=np.int64)


def compose(ops: Mapping[str, Floats], model: ModelSpec, stage_layers: Ints, source: str) -> CostTables:
    """Return cost tables that give Vidur's stage times when read by the rule MERGED. ``ops`` are milliseconds.

    All operators except the cache write are read at the step's tokens, rounded up to a multiple of 8. The all-reduce
    counts twice per layer, with 0.02 ms of launch each. With GQA, merging several requests multiplies attention by 1.1.
    Vidur counts neither embedding, final norm, LM head, sampling nor host. Several stages need ``send_recv``.
    """
    needed = [*ONCE_A_LAYER, PREFILL, DECODE] + [SEND_RECV] * (len(stage_layers) > 1)
    if missing := [name for name in needed if name not in ops]:
        raise ProfileError(f"{source} must hold {', '.join(missing)}; it holds {', '.join(sorted(ops))}")
    tokens = np.arange(len(ops[ONCE_A_LAYER[0]]))
    zeros = np.zeros(len(tokens))
    rounded = np.minimum(-(-tokens // ROUND_TOKENS) * ROUND_TOKENS, tokens[-1])
    names = [*ONCE_A_LAYER] + [SECOND_NORM] * (SECOND_NORM in ops)
    layer_ms = np.sum([ops[name][rounded] for name in names], axis=0) + ops.get(CACHE_SAVE, zeros)
    comm_ms = 2.0 * (ops[ALL_REDUCE][rounded] + ALL_REDUCE_LAUNCH_MS) if ALL_REDUCE in ops else zeros
    merge_factor = 1.0 + MERGE_OVERHEAD if model.attention.is_gqa else 1.0
    return CostTables(
        layer_s=seconds(layer_ms),
        comm_s=seconds(comm_ms),
        embedding_s=zeros,
        send_s=seconds(ops[SEND_RECV][rounded] if SEND_RECV in ops else zeros),
        head_s=np.zeros(HIGHEST_BATCH + 1),
        host_s=np.zeros(HIGHEST_BATCH + 1),
        prefill_s=seconds(np.ascontiguousarray(ops[PREFILL].T)),
        decode_s=seconds(ops[DECODE]),
        stage_layers=stage_layers,
        rule=AttentionRule(MERGED, CONTEXT_STEP_TOKENS, merge_factor),
        evidence=CostEvidence(source),
    )


def seconds(milliseconds: Floats) -> Floats:
    """Return the seconds of [n, ...] milliseconds, with 0 at the first index (no tokens)."""
    found = np.asarray(milliseconds, dtype=np.float64) / 1000.0
    found[0] = 0.0
    return found


@dataclass(frozen=True)
class ProfileFiles:
    """The CSV files of a Vidur profile that a deployment needs. Several files ``attention`` are parts of one table."""

    mlp: Path
    attention: tuple[Path, ...]
    all_reduce: Path | None
    send_recv: Path | None

    def paths(self) -> list[Path]:
        """Return all files in a fixed order."""
        return [path for path in (self.mlp, *self.attention, self.all_reduce, self.send_recv) if path]


def find_files(
    folder: Path, model: ModelSpec, gpu_name: str, parallel: Parallelism, node: NodeSpec | None
) -> ProfileFiles:
    """Find the files of a model on a GPU, by folders' names. Raises ProfileError if a folder or file is missing."""
    device = device_folder(folder, gpu_name)
    place = model_folder(device, model)
    mlp, attention = csv_file(place, "mlp"), attention_files(place)
    if not attention:
        remedy = "Add a measured one, or use the roofline (cost = 'roofline')."
        raise ProfileError(f"{place} must hold attention.csv; it holds {names_in(place)}. {remedy}")
    network = network_folder(folder, device.name, node) if parallel.tp * parallel.pp > 1 else None
    return ProfileFiles(
        mlp,
        attention,
        csv_file(network, ALL_REDUCE) if network and parallel.tp > 1 else None,
        csv_file(network, SEND_RECV) if network and parallel.pp > 1 else None,
    )


def attention_files(place: Path) -> tuple[Path, ...]:
    """Return the file attention.csv in a model's folder, or else its parts attention_*.csv, or else nothing."""
    if has_csv(place, "attention"):
        return (csv_file(place, "attention"),)
    return tuple(sorted(place.glob("attention_*.csv*")))


def device_folder(folder: Path, gpu_name: str) -> Path:
    """Return the folder under compute/ that is named after a GPU. Raises ProfileError if there is none.

    ``gpu_name`` must begin with its name ("A100-80GB": a100). Of several, the longest name is taken.
    """
    if not folder.is_dir():
        raise ProfileError(f"a Vidur profile must be a folder with compute/ and network/; {folder} is not one")
    compute = folder / "compute"
    folders = _subfolders(compute)
    matching = [path for path in folders if _plain(gpu_name).startswith(_plain(path.name))]
    if not matching:
        is_inside = folder.name == "compute" and not compute.exists()
        hint = f". Give the folder that holds compute/, which is {folder.parent}" if is_inside else ""
        raise ProfileError(f"{compute} must hold a folder for {gpu_name}; it holds {_listed(folders)}{hint}")
    return max(matching, key=lambda path: len(path.name))


def model_folder(device: Path, model: ModelSpec) -> Path:
    """Return the folder with a model's name or alias. Raises ProfileError if there is none."""
    folders = sorted({path.parent for path in device.rglob("mlp.csv*")})
    names = {name.lower() for name in (model.name, *model.metadata.aliases)}
    names |= {name.rpartition("/")[2] for name in names}
    for path in folders:
        if names & {path.name.lower(), path.relative_to(device).as_posix().lower()}:
            return path
    listed = ", ".join(path.relative_to(device).as_posix() for path in folders) or "none"
    raise ProfileError(f"{device} must hold a folder for {model.name} with mlp.csv; it holds {listed}")


def network_folder(folder: Path, device: str, node: NodeSpec | None) -> Path:
    """Return the folder of ``node``, or of the device's usual node. Raises ProfileError if there is none.

    If ``node`` is None, the device's pairwise NVLink is taken, or else its DGX.
    """
    network = folder / "network"
    folders = _subfolders(network)
    names = [node.name, *node.aliases] if node else [f"{device}_pairwise_nvlink", f"{device}_dgx"]
    for path in (path for name in names for path in folders if _plain(path.name) == _plain(name)):
        return path
    raise ProfileError(f"{network} must hold a folder for the node {names[0]}; it holds {_listed(folders)}")


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_dir())


def _listed(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths) or "none"


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def csv_file(folder: Path, name: str) -> Path:
    """Return the CSV file of this name, compressed with gzip or not. Raises ProfileError if there is none."""
    for suffix in (".csv", ".csv.gz"):
        path = folder / f"{name}{suffix}"
        if path.is_file():
            return path
    raise ProfileError(f"{folder} must hold {name}.csv; it holds {names_in(folder)}")


def has_csv(folder: Path, name: str) -> bool:
    """Return whether a folder has a CSV file of this name, compressed with gzip or not."""
    return any((folder / f"{name}{suffix}").is_file() for suffix in (".csv", ".csv.gz"))


def names_in(folder: Path) -> str:
    """Return the sorted names in a folder, for messages."""
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
