"""A small application on emulated engines, real processes, that tests of profiles share."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace

from lengthwise import catalog
from lengthwise.apps.app import App, Call, Model, Sampling
from lengthwise.apps.launch import EngineConfig, EngineTimeouts, LocalLauncher
from lengthwise.apps.plan import Served, Space
from lengthwise.schema.app import Cluster, Machine
from lengthwise.schema.deployment import EngineLimits
from lengthwise.usecases.app_profile_folder import SWITCH_TIMES

GPU = "A100-80GB"
SERVER = f"{sys.executable} -m lengthwise.testing.engine_server --host {{host}} --port {{port}} --model {{name}}"
QUICK = EngineTimeouts(ready_s=60.0, grace_s=3.0, stall_s=20.0, request_s=60.0)
LIMITS = EngineLimits(max_num_seqs=4, max_model_len=2048)
ROWS = [{"topic": f"the sea, part {n}"} for n in range(6)]


def cluster(gpus=2):
    return Cluster((Machine(catalog.gpu(GPU), replace(catalog.node("dgx-a100"), gpus=gpus), gpus),))


def app(most=24):
    """A draft by one model that the other judges."""
    short = Sampling(max_tokens=most)
    return App(
        [Model(name, "opt-125m", limits=LIMITS) for name in ("writer", "judge")],
        [
            Call("draft", "writer", "Write of {{ topic }}", sampling=short),
            Call("decision", "judge", "Judge {{ draft }}", sampling=short),
        ],
    )


def space(gpus=2):
    return Space([Served(model.name, model.spec, model.limits) for model in app().models], cluster(gpus))


def launcher(folder, *, more="--fixed-s 0.002", sleeps=True):
    loaded = [
        EngineConfig(name, served=name, max_num_seqs=4, command=f"{SERVER} {more}", sleeps=sleeps)
        for name in ("writer", "judge")
    ]
    return LocalLauncher(loaded, folder / "logs", timeouts=QUICK)


def switch_times(folder):
    """The rows of a profile's file of switch times."""
    rows = tomllib.loads((folder / SWITCH_TIMES).read_text())["replica"]
    return {(row["model"], row["gpu"], row["tp"], row["pp"], row["how"]): row["seconds"] for row in rows}
