"""``--set key=null`` takes a key away."""

from __future__ import annotations

from lengthwise.config import load


def test_null_takes_a_key_of_a_scenario_away(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(
        '[workload]\npreset = "chat-1m"\nnum_requests = 7\nrequest_rate = 2.0\n'
        '[deployment]\nmodel = "llama-3.1-8b"\ngpu = "H100"\n'
    )
    assert load(path).workload.num_requests == 7
    changed = load(path, ["workload.num_requests=null", "workload.request_rate=null", "deployment.tp=null"])
    assert changed.workload.num_requests is None
    assert changed.workload.request_rate is None
    assert changed.deployment.tp == load(path).deployment.tp
