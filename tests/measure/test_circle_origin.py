"""Runs of a circle keep what was served, so that a calibration knows whose they are."""

from __future__ import annotations

import os
from dataclasses import replace

import _circle
import _vllm
import numpy as np
from scripted_server import Script, ScriptedServer

from lengthwise import Workload, deploy
from lengthwise.config import loads
from lengthwise.measure.calibration.measured_runs import origin_warnings, unknown_origin
from lengthwise.usecases.bench import deployment_of_server
from lengthwise.usecases.variants import deployment as of_scenario


def test_a_watched_run_stores_its_deployment_and_is_refused_for_another(tmp_path):
    served, log = deploy("opt-125m", "H100"), tmp_path / "_vllm.log"
    log.write_text("")
    requests = Workload(np.zeros(2), np.array([8, 8]), np.array([4, 4]))
    with ScriptedServer(Script()) as server:
        watched = _vllm.Watched(server.url, "toy", log, os.getpgid(0), tmp_path, deployment=_circle.facts_of(served))
        run = watched.bench(requests)
    assert unknown_origin([run], ["one"], served) == ""
    assert origin_warnings(run, served) == []
    (warning,) = origin_warnings(run, deploy("llama-3.1-8b", "H100"))
    assert "it is of the model opt-125m" in warning
    bare = replace(run, metadata={key: of for key, of in run.metadata.items() if key != "deployment"})
    assert "the origin of these runs is unknown: one" in unknown_origin([bare], ["one"], served)


def test_a_run_stores_what_bench_stores_of_a_scenario(tmp_path):
    text = '[workload]\npreset = "chat-1m"\nnum_requests = 9\n'
    text += '[deployment]\nmodel = "llama-3.1-8b"\ngpu = "H100"\ntp = 2\n'
    (tmp_path / "s.toml").write_text(f"{text}[engine]\nmax_model_len = 4096\n")
    retained = deployment_of_server(tmp_path / "s.toml", None, None, [])
    reported = _circle.facts_of(of_scenario(loads((tmp_path / "s.toml").read_text())))
    assert {key: retained[key] for key in reported} == reported
