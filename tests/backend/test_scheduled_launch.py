"""Commands of engines that keep a schedule: what they say, and what vLLM makes of them."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from lengthwise import EngineLimits, deploy
from lengthwise.backend import ScheduledEngines, phased_launch, scheduled_scripts, split_launches

SERVE = Path(__file__).parent / "engine" / "parse_scheduled.py"
ENGINE = Path(__file__).parents[2] / ".engines" / "vllm" / "bin" / "python"
PHASES = {"prefill_batch": 8, "decode_steps": 16, "record": "phases.jsonl"}
LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=4096)


def one(tp=1):
    return deploy("llama-3.1-8b", "H200", tp=tp, limits=LIMITS)


def commands():
    return [phased_launch(one(), PHASES).command, *(la.command for la in split_launches(one(2), one(4)))]


def test_sides_differ_in_role_and_degree():
    prefill, decode = (dict(pairwise(la.command)) for la in split_launches(one(2), one(4)))
    assert json.loads(prefill["--kv-transfer-config"])["kv_role"] == "kv_producer"
    assert json.loads(decode["--kv-transfer-config"])["kv_role"] == "kv_consumer"
    assert (prefill["--tensor-parallel-size"], decode["--tensor-parallel-size"]) == ("2", "4")


def test_every_pair_has_gpus_and_ports_of_its_own():
    scripts = scheduled_scripts(ScheduledEngines("two pairs", one(1), one(2), pairs=2))
    assert "serve 0 8100 5600" in scripts["prefill.sh"]
    assert "serve 3 8101 5601" in scripts["prefill.sh"]
    assert "serve 1,2 8200 5700" in scripts["decode.sh"]
    assert "serve 4,5 8201 5701" in scripts["decode.sh"]
    assert "'http://127.0.0.1:8100 http://127.0.0.1:8101'" in scripts["router.sh"]
    assert "'http://127.0.0.1:8200 http://127.0.0.1:8201'" in scripts["router.sh"]


def test_stage_engines_get_no_internal_phases():
    assert set(scheduled_scripts(ScheduledEngines("stages", one(2)))) == {"vllm.sh"}
    assert set(scheduled_scripts(ScheduledEngines("one", one(2), phases=PHASES))) == {"vllm.sh", "vllm-phases.sh"}


@pytest.mark.engine
@pytest.mark.slow
def test_vllms_own_parser_takes_them():
    """Roles and connector are checked by vLLM's own configuration; one that is not known is refused."""
    if not ENGINE.exists():
        pytest.skip("no vLLM in .engines")
    wrong = tuple(word.replace("kv_producer", "kv_giver") for word in commands()[1])
    done = subprocess.run(
        [str(ENGINE), str(SERVE)], input=json.dumps([*commands(), wrong]), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    phased, prefill, decode, refused = json.loads(done.stdout.partition("ANSWERS")[2])
    assert phased["scheduler_cls"] == "lengthwise.gateway.plugin.RraScheduler"
    assert phased["additional_config"] == {"lengthwise": PHASES}
    assert (prefill["connector"], prefill["role"]) == ("NixlConnector", "kv_producer")
    assert (decode["connector"], decode["role"]) == ("NixlConnector", "kv_consumer")
    assert prefill["connector"] in prefill["known"]
    assert "error" in refused
