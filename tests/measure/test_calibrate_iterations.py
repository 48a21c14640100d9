"""A log of iterations becomes steps, and steps tell the same parameters as requests do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise import engine
from lengthwise.engine.step_time import CostReader, step_time
from lengthwise.measure.calibration import read_iterations
from lengthwise.measure.calibration.iteration_log import merge_similar
from lengthwise.measure.calibration.parameters import apply
from lengthwise.measure.calibration.step_evidence import step_parts, step_seconds
from lengthwise.schema.errors import InputError

PREFIX = "(APIServer pid=88) INFO 11-21 10:00:00 [loggers.py:210] "
STEP = (
    "Iteration({i}): {p} context requests, {t} context tokens, {d} generation requests, {d} generation tokens, "
    "iteration elapsed time: {ms:.2f} ms, CPU KV cache usage: {kv:.1f}%"
)


def write(path, steps, more=""):
    lines = [PREFIX + STEP.format(i=i, p=p, t=t, d=d, ms=ms, kv=kv) for i, (p, t, d, ms, kv) in enumerate(steps)]
    path.write_text("\n".join(["INFO: Started server", *lines]) + "\n" + more, "utf-8")
    return path


def test_steps_are_read_and_the_rest_passed_over(tmp_path):
    dummy = STEP.format(i=9, p=0, t=0, d=1, ms=4.0, kv=0).replace(" ms,", " ms (dummy),")
    steps = [(1, 300, 0, 31.25, 2.0), *[(0, 0, 4, 9.5, 3.0)] * 24]
    log = read_iterations(write(tmp_path / "log", steps, dummy))
    assert len(log) == 25
    assert (log.prefill_seqs[0], log.prefill_tokens[0], log.decode_seqs[0]) == (1, 300, 0)
    assert log.seconds[0] == pytest.approx(0.03125)
    assert log.kv_share[1] == pytest.approx(0.03)


def test_a_log_without_the_cache_is_read(tmp_path):
    path = write(tmp_path / "log", [(0, 0, 4, 9.5, 3.0)] * 20)
    path.write_text(path.read_text("utf-8").replace(", CPU KV cache usage: 3.0%", ""), "utf-8")
    assert np.isnan(read_iterations(path).kv_share).all()


def test_log_lines_may_or_may_not_have_a_time(tmp_path):
    path = write(tmp_path / "log", [(0, 0, 4, 9.5, 3.0)] * 20)
    days = 31 + 29 + 31 + 30 + 31 + 30 + 31 + 31 + 30 + 31 + 20
    assert (read_iterations(path).at_s == (24 * days + 10) * 3600.0).all()
    lines = path.read_text("utf-8").replace("11-21 10:00:00", "02-31 10:00:00", 1).splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1].removeprefix(PREFIX)]), "utf-8")
    assert np.isnan(read_iterations(path).at_s).tolist() == [True, *[False] * 18, True]
    path.write_text(path.read_text("utf-8").replace(PREFIX, "").replace("02-31", ""), "utf-8")
    assert read_iterations(path).at_s is None


def test_a_log_without_steps_is_refused(tmp_path):
    (tmp_path / "log").write_text("nothing\n")
    with pytest.raises(InputError, match="--enable-logging-iteration-details"):
        read_iterations(tmp_path / "log")
    with pytest.raises(InputError, match="log to read"):
        read_iterations(tmp_path / "none")


def test_cells_hold_medians_that_one_slow_step_does_not_move(tmp_path):
    steps = [(0, 0, 4, 10.0, 3.0)] * 20 + [(0, 0, 4, 900.0, 3.0)] * 3 + [(1, 512, 4, 50.0, 5.0)] * 5
    cells = merge_similar(read_iterations(write(tmp_path / "log", steps)))
    assert sorted(cells.seconds.tolist()) == pytest.approx([0.010, 0.050])
    assert sorted(cells.steps.tolist()) == [5, 23]


def test_steps_cost_what_the_engine_charges(tmp_path):
    """Parts in our own order add up to a simulated step's seconds, whatever the scales."""
    deployment = engine.deploy("llama-3-8b", "H100")
    values = {"work": 1.2, "prefill": 0.8, "decode": 1.5, "log_step": 1e-3, "host_sequence": 2e-5}
    steps = [(1, 700, 0, 1.0, 0.0), (0, 0, 1, 1.0, 0.0), *[(0, 0, 2, 1.0, 0.0)] * 20]
    log = read_iterations(write(tmp_path / "log", steps))
    own = step_seconds(step_parts(log, deployment), values)
    cost = apply(deployment.cost, values | {"host_step": values["log_step"]})
    prefill = (
        32 * (cost.layer_s[700] + _read(cost.prefill_s, 700)) + cost.embedding_s[700] + cost.head_s[1] + cost.host_s[1]
    )
    assert own[0] == pytest.approx(prefill, rel=1e-6)
    decode = 32 * (cost.layer_s[1] + cost.decode_s[1, 1]) + cost.embedding_s[1] + cost.head_s[1] + cost.host_s[1]
    assert own[1] == pytest.approx(decode, rel=1e-6)


def test_decodes_next_to_prompts_cost_what_the_engine_charges(tmp_path):
    """As the engine's own reader prices a step of both."""
    deployment = engine.deploy("llama-3-8b", "H100")
    cost = deployment.cost
    cost = replace(cost, beside_prompts=np.full_like(cost.decode_s, 3.0))
    steps = [(1, 512, 4, 1.0, 1.0), (0, 0, 4, 1.0, 1.0), *[(0, 0, 2, 1.0, 0.0)] * 20]
    log = read_iterations(write(tmp_path / "log", steps))
    parts = step_parts(log, replace(deployment, cost=cost))
    held_out = 0.01 * deployment.kv.num_blocks * deployment.kv.block_size
    reader = CostReader(cost)
    companion = reader.step(4, round(held_out - 512), [(512, 0)]).decode_attention_s
    alone = reader.step(4, round(held_out), []).decode_attention_s
    assert parts["decode"][:2] == pytest.approx([companion, alone], rel=1e-3)
    assert parts["decode"][0] > 2.5 * parts["decode"][1]


def test_dense_masks_cost_logged_steps_what_the_engine_charges(tmp_path):
    deployment = engine.deploy("llama-3-8b", "H100")
    masked = replace(deployment.cost, masked_s=1e-10)
    steps = [(2, 512, 4, 1.0, 1.0), (0, 0, 4, 1.0, 1.0), (1, 512, 0, 1.0, 0.0), *[(0, 0, 1, 1.0, 1.0)] * 20]
    log = read_iterations(write(tmp_path / "log", steps))
    parts = step_parts(log, deployment)
    values = {"log_step": 0.0, "host_sequence": 0.0}
    more_s = step_seconds(parts, values | {"masked": masked.masked_s}) - step_seconds(parts, values)
    held_out = round(0.01 * deployment.kv.num_blocks * deployment.kv.block_size)
    requested = [(4, held_out - 512, [(256, 0)] * 2), (4, held_out, []), (0, 0, [(512, 0)]), (1, held_out, [])]
    reported = [step_time(masked)(*step) - step_time(deployment.cost)(*step) for step in requested]
    assert more_s[:4] == pytest.approx(reported, rel=1e-3, abs=1e-12)
    assert reported[0] > reported[1] > 1e-5
    assert reported[2:] == [0.0, 0.0]


def _read(table, chunk):
    from lengthwise.schema.cost_tables import grid_axis

    return np.interp(chunk, grid_axis(2**20)[: table.shape[0]], table[:, 0])
