from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from lengthwise import EngineLimits, Poisson, Scheduler, Workload, deploy, engine, preset
from lengthwise.backend import load_test, trtllm_launch, vllm_launch, write_launch, write_trace
from lengthwise.backend.launch_folder import dns_name
from lengthwise.config import loads_gateway
from lengthwise.schema.deployment import TrtllmSettings
from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.speculation import Speculation
from lengthwise.schema.workload import UNCAPPED, After, SharedPrefixes
from lengthwise.workload import read

LIMITS = EngineLimits(max_model_len=4096)
WORKLOAD = preset("chat-1m").generate(1000, Poisson(4.0), seed=0)
PRINTS_ITSELF = '#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done > "$SEEN.$CUDA_VISIBLE_DEVICES"\n'


def write(folder, name="70B, cheap", claim="It serves 4 requests a second.", **options):
    options = {"tp": 4, "replicas": 2, "limits": LIMITS} | options
    d = deploy(options.pop("model", "llama-3.1-70b"), "H100", **options)
    text = "name = 'x'\n"
    return d, write_launch(folder, d, name=name, scenario_text=text, workload=WORKLOAD, rate_rps=4.0, claim=claim)


def run(script, tmp_path, *programs, **environment):
    """Runs a script with stand-ins on the path that record their words; what they saw, by GPUs."""
    for program in programs:
        path = tmp_path / "bin" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PRINTS_ITSELF)
        path.chmod(0o755)
    seen = tmp_path / "seen"
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SEEN": str(seen), **environment}
    subprocess.run(["sh", str(script)], check=True, env=variables, timeout=30)
    return {p.name.partition(".")[2]: p.read_text().splitlines() for p in tmp_path.glob("seen.*")}


def yaml_of(folder, kind):
    (found,) = [r for r in yaml.safe_load_all((folder / "kubernetes.yaml").read_text()) if r["kind"] == kind]
    return found


def test_the_folder_contains_the_listed_files(tmp_path):
    _, made = write(tmp_path / "one")
    names = {p.name for p in made}
    assert names == {p.name for p in (tmp_path / "one").iterdir()}
    assert names == {
        "README.md",
        "vllm.sh",
        "sglang.sh",
        "router.sh",
        "load-test.sh",
        "trace.jsonl",
        "kubernetes.yaml",
        "dynamo.yaml",
        "dynamo-sglang.yaml",
        "scenario.toml",
    }
    readme = (tmp_path / "one" / "README.md").read_text()
    assert "It serves 4 requests a second." in readme
    assert (tmp_path / "one" / "scenario.toml").read_text() == "name = 'x'\n"


def test_trtllms_rules_get_its_script_and_options(tmp_path):
    own = TrtllmSettings("MAX_UTILIZATION", enable_chunked_prefill=True)
    limits = replace(LIMITS, max_num_seqs=128, kv_dtype="fp8")
    d, made = write(tmp_path / "one", scheduler=Scheduler(trtllm=own), limits=limits, num_blocks=30_000)
    assert {"trtllm.sh", "trtllm.yaml"} <= {path.name for path in made}
    assert "Or run TensorRT-LLM on Kubernetes" in (tmp_path / "one" / "README.md").read_text()
    assert (tmp_path / "one" / "trtllm.yaml").read_text() in yaml_of(tmp_path / "one", "ConfigMap")["data"].values()
    words = run(tmp_path / "one" / "trtllm.sh", tmp_path, "trtllm-serve")["0,1,2,3"]
    launch = trtllm_launch(d, port=8001)
    at = words.index("--config") + 1
    assert tuple(words[:at]) == launch.command[1 : at + 1]
    options = yaml.safe_load(Path(words[at]).read_text())
    assert options == {
        "kv_cache_config": {
            "enable_block_reuse": False, "tokens_per_block": 16, "max_tokens": 480_000, "dtype": "fp8",
        },
        "enable_chunked_prefill": True,
        "dtype": "bfloat16",
        "scheduler_config": {
            "capacity_scheduler_policy": "MAX_UTILIZATION", "context_chunking_policy": "FIRST_COME_FIRST_SERVED",
        },
    }  # fmt: skip
    readme = (tmp_path / "one" / "README.md").read_text()
    assert "Start the engine, `sh trtllm.sh`" in readme
    assert "### TensorRT-LLM (trtllm.sh)" in readme


def test_no_resource_has_the_name_vllm(tmp_path):
    write(tmp_path / "one", name="vLLM")
    resources = list(yaml.safe_load_all((tmp_path / "one" / "kubernetes.yaml").read_text()))
    names = {resource["metadata"]["name"] for resource in resources}
    assert names == {"engine-vllm", "engine-vllm-pods"}


def test_pods_get_the_token_of_a_gated_model_from_a_secret_that_the_readme_creates(tmp_path):
    write(tmp_path / "one")
    (container,) = yaml_of(tmp_path / "one", "StatefulSet")["spec"]["template"]["spec"]["containers"]
    (secret,) = [one["valueFrom"]["secretKeyRef"] for one in container["env"] if one["name"] == "HF_TOKEN"]
    assert secret["optional"]
    readme = (tmp_path / "one" / "README.md").read_text()
    assert f"`kubectl create secret generic {secret['name']} --from-file={secret['key']}`" in readme


def test_a_test_of_several_replicas_on_kubernetes_reaches_all_of_them(tmp_path):
    """A port-forward of a Service is pinned to one pod."""
    write(tmp_path / "one", replicas=3, tp=2)
    readme = (tmp_path / "one" / "README.md").read_text()
    resources = list(yaml.safe_load_all((tmp_path / "one" / "kubernetes.yaml").read_text()))
    service, headless = [one["metadata"]["name"] for one in resources if one["kind"] == "Service"]
    assert "measures 1 of 3 replicas" in readme
    assert f"ENDPOINT=http://{service}:8000 sh /tmp/launch/load-test.sh" in readme
    workers = [f"http://{service}-{i}.{headless}:8000" for i in range(3)]
    assert f"WORKERS='{' '.join(workers)}'" in readme
    seen = run(tmp_path / "one" / "router.sh", tmp_path, "vllm-router", WORKERS=" ".join(workers))[""]
    assert seen[seen.index("--worker-urls") + 1 :] == workers
    remarks = (tmp_path / "one" / "kubernetes.yaml").read_text().replace("\n# ", " ")
    assert "see `On Kubernetes` in README.md" in remarks
    assert "\n## On Kubernetes\n" in readme
    write(tmp_path / "single", replicas=1)
    readme = (tmp_path / "single" / "README.md").read_text()
    assert f"`kubectl port-forward service/{service} 8000`" in readme
    assert "measures 1 of" not in readme


@pytest.mark.parametrize("own", [None, TrtllmSettings()])
def test_the_readme_names_model_versions_and_what_the_load_test_needs(tmp_path, own):
    scheduler = {} if own is None else {"scheduler": Scheduler(trtllm=own)}
    write(tmp_path / "one", name="tp4", **scheduler)
    readme = (tmp_path / "one" / "README.md").read_text()
    assert readme.startswith("# llama-3.1-70b: tp4\n")
    assert re.search(r"flags of .*vLLM 0\.32\.0", readme)
    assert "SGLang 0.5.23" in readme
    assert ("TensorRT-LLM 1.2.0" in readme) == (own is not None)
    assert "install vLLM (`pip install vllm`) where you start it, whatever the engine" in readme


def test_the_same_input_gives_the_same_bytes(tmp_path):
    _, first = write(tmp_path / "one")
    _, second = write(tmp_path / "two")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    _, again = write(tmp_path / "one")
    assert again == first


def test_the_shell_reads_every_script(tmp_path):
    _, made = write(tmp_path / "one", name='a"; rm -rf "$HOME\n exit 1; `id` $(id)', claim="It's 100 % `so`.")
    for path in made:
        if path.suffix == ".sh":
            assert subprocess.run(["sh", "-n", str(path)], check=False).returncode == 0
            code = [line for line in path.read_text().splitlines() if not line.startswith("#")]
            assert not any("rm -rf" in line for line in code), path


def test_the_script_starts_each_replica_with_the_words_of_its_launch(tmp_path):
    d, _ = write(tmp_path / "one")
    seen = run(tmp_path / "one" / "vllm.sh", tmp_path, "vllm")
    for replica, gpus in enumerate(("0,1,2,3", "4,5,6,7")):
        launch = vllm_launch(d, port=8001 + replica, replica=replica)
        assert launch.environment == {"CUDA_VISIBLE_DEVICES": gpus}
        assert tuple(seen[gpus]) == launch.command[1:]


def test_another_checkpoint_may_be_given_from_outside(tmp_path):
    write(tmp_path / "one", replicas=1)
    seen = run(tmp_path / "one" / "sglang.sh", tmp_path, "python3", MODEL="a folder/$(id)")
    words = seen["0,1,2,3"]
    assert words[words.index("--model-path") + 1] == "a folder/$(id)"
    assert words[words.index("--port") + 1] == "8000"


def test_a_deployment_on_cpus_gets_the_cpu_command_and_its_variable(tmp_path):
    cpus = deploy("llama-3.2-1b", "CPU-EPYC-9654", limits=EngineLimits(max_model_len=2048), num_blocks=1024)
    made = write_launch(
        tmp_path / "one", cpus, name="cpu", scenario_text="", workload=WORKLOAD, rate_rps=4.0, claim="Slow."
    )
    assert "kubernetes.yaml" not in {p.name for p in made}
    text = (tmp_path / "one" / "vllm.sh").read_text()
    space = vllm_launch(cpus, device="cpu").environment["VLLM_CPU_KVCACHE_SPACE"]
    assert f"VLLM_CPU_KVCACHE_SPACE={space}\nexport VLLM_CPU_KVCACHE_SPACE\n" in text
    assert "--dtype float32" in text


def test_an_unknown_checkpoint_must_be_given_to_the_script(tmp_path):
    _, made = write(tmp_path / "one", model="gpt3-39b", replicas=1, limits=EngineLimits())
    assert "kubernetes.yaml" not in {p.name for p in made}
    with pytest.raises(subprocess.CalledProcessError):
        run(tmp_path / "one" / "vllm.sh", tmp_path, "vllm")
    seen = run(tmp_path / "one" / "vllm.sh", tmp_path, "vllm", MODEL="own")
    assert seen["0,1,2,3"][:2] == ["serve", "own"]


def test_the_router_gets_every_worker_and_the_nearest_policy(tmp_path):
    write(tmp_path / "one", scheduler=Scheduler(router="least_tokens"))
    words = run(tmp_path / "one" / "router.sh", tmp_path, "vllm-router")[""]
    assert words[words.index("--worker-urls") + 1 :] == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    assert words[words.index("--policy") + 1] == "power_of_two"


@pytest.mark.parametrize(
    ("router", "nearest"),
    [
        ("session_affinity", "consistent_hash"),
        ("cache_aware", "cache_aware"),
        ("prefix_approximate", "cache_aware"),
        ("prefix_precise", "cache_aware"),
        ("uncached_load", "cache_aware"),
    ],
)
def test_routers_of_sessions_and_of_prefixes_become_the_nearest_of_vllms_router(router, nearest, tmp_path):
    limits = replace(LIMITS, enable_prefix_caching=True)
    write(tmp_path / "one", scheduler=Scheduler(router=router), limits=limits)
    words = run(tmp_path / "one" / "router.sh", tmp_path, "vllm-router")[""]
    assert words[words.index("--policy") + 1] == nearest
    for file in ("router.sh", "vllm.sh", "README.md"):
        text = " ".join((tmp_path / "one" / file).read_text().replace("#", "").split())
        assert ("as the header X-Session-ID" in text) == (router == "session_affinity")


def test_prompts_of_a_trace_begin_alike_as_simulated(tmp_path):
    prefixes = SharedPrefixes(16, np.array([0, 2, 4, 4]), np.array([7, 8, 7, 9]))
    shared = Workload(np.arange(3.0), np.array([40, 48, 20]), np.full(3, 5), prefixes=prefixes)
    write_trace(tmp_path / "trace.jsonl", shared)
    ids = [json.loads(line)["hash_ids"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [one[:2] for one in ids[:2]] == [[7, 8], [7, 9]]
    assert list(map(len, ids)) == [3, 3, 2]
    own = [ids[0][2], ids[1][2], *ids[2]]
    assert len({*own, 7, 8, 9}) == len(own) + 3
    command = load_test(deploy("llama-3.1-8b", "H100", limits=LIMITS), shared, trace="t", rate_rps=1.0).command
    assert command[command.index("--timed-trace-chunk-hash-size") + 1] == "16"


def test_a_trace_has_no_requests_that_wait_for_others(tmp_path):
    turns = After(np.array([0, 0, 1]), np.array([0]))
    workload = Workload(np.zeros(2), np.full(2, 10), np.full(2, 5), after=turns)
    with pytest.raises(InputError, match="depend on others"):
        write_trace(tmp_path / "trace.jsonl", workload)


def test_the_load_test_runs_next_to_its_trace(tmp_path):
    _, made = write(tmp_path / "one")
    words = run(tmp_path / "one" / "load-test.sh", tmp_path, "vllm", ENDPOINT="http://there:1")[""]
    assert words[words.index("--base-url") + 1] == "http://there:1"
    trace = [json.loads(line) for line in made[-1].read_text().splitlines()]
    assert words[words.index("--num-prompts") + 1] == str(len(trace)) == "1000"


def test_a_trace_is_exact_to_the_token_for_each_request(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, WORKLOAD, 100)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["input_length"] for r in rows] == WORKLOAD.prompt_tokens[:100].tolist()
    assert [r["output_length"] for r in rows] == WORKLOAD.output_tokens[:100].tolist()
    np.testing.assert_allclose([r["timestamp"] for r in rows], 1e3 * WORKLOAD.arrival_s[:100], atol=1e-3)
    assert len({tuple(r["hash_ids"]) for r in rows}) == 100


PREFIXES = SharedPrefixes(32, np.array([0, 1, 2, 3]), np.array([7, 7, 7]))
LIMITS_OF_CLIENTS = {
    "max_tokens": np.array([9, 6, UNCAPPED]),
    "ignore_eos": np.array([False, True, False]),
    "priority": np.array([0, -2, 1]),
    "tenant": np.array([1, 0, 1]),
}


@pytest.mark.parametrize("prefixes", [None, PREFIXES])
@pytest.mark.parametrize("limits", [{}, LIMITS_OF_CLIENTS])
def test_lengthwise_reads_the_trace_of_a_load_test(tmp_path, prefixes, limits):
    sent = Workload(np.array([0, 0.25, 2.5]), np.array([40, 1400, 64]), np.full(3, 6), prefixes=prefixes, **limits)
    write_trace(tmp_path / "trace.jsonl", sent)
    got = read(tmp_path / "trace.jsonl")
    np.testing.assert_allclose(got.arrival_s, sent.arrival_s)
    for name in ("prompt_tokens", "output_tokens", *LIMITS_OF_CLIENTS):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
    assert got.prefixes.block_tokens == (32 if prefixes else 1400)
    firsts = got.prefixes.block_ids[got.prefixes.start[:-1]]
    assert len(set(firsts.tolist())) == (1 if prefixes else 3)


def test_the_load_test_says_that_it_sends_lengths_in_place_of_the_clients_limits():
    d = deploy("llama-3.1-8b", "H100", limits=LIMITS)
    sent = Workload(np.zeros(2), np.full(2, 10), np.full(2, 20))
    for limits, is_noted in ((None, False), ([20, 20], False), ([20, 21], True), ([20, UNCAPPED], True)):
        notes = load_test(d, replace(sent, max_tokens=limits), trace="t", rate_rps=0.5).notes
        assert any("not the client's limit" in note for note in notes) == is_noted


def test_the_rate_of_the_requests_that_are_sent_stands_beside_the_claim():
    d = deploy("llama-3.1-8b", "H100", limits=LIMITS)
    rising = Workload(np.array([0.0, 4.0, 8.0, 9.0, 10.0]), np.full(5, 10), np.full(5, 20))
    sent = {n: load_test(d, rising, trace="t", rate_rps=0.5, num_requests=n).notes[0] for n in (1, 3, 5)}
    assert "The first 3 of 5 requests are sent" in sent[3]
    assert "0.25 a second on average (claim: 0.5)" in sent[3]
    assert "0.4 a second on average (claim: 0.5)" in sent[5]
    assert "0.5 a second on average (claim: 0.5)" in sent[1]


def test_a_closed_loop_maintains_its_concurrency():
    d = deploy("llama-3.1-8b", "H100", limits=LIMITS)
    loop = Workload(np.zeros(5), np.full(5, 10), np.full(5, 20), concurrency=3)
    launch = load_test(d, loop, trace="t", rate_rps=1.0)
    assert launch.command[launch.command.index("--max-concurrency") + 1] == "3"
    assert "3 requests are kept in the system" in launch.notes[0]
    with pytest.raises(InputError, match="num_requests"):
        load_test(d, loop, trace="t", rate_rps=1.0, num_requests=0)


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    with pytest.raises(OutputError, match="no/such"):
        write(tmp_path / "no" / "such")


def write_split(folder, prefills, decodes, tp=(1, 2), gpus=("H100", "H100")):
    sides = [
        deploy("llama-3.1-8b", gpu, tp=of, replicas=n, limits=LIMITS)
        for gpu, of, n in zip(gpus, tp, (prefills, decodes), strict=True)
    ]
    d = engine.disaggregate(*sides)
    return write_launch(
        folder, d, name="split", scenario_text="name = 'x'\n", workload=WORKLOAD, rate_rps=4.0, claim="It serves."
    )


def test_scripts_of_separate_sides_use_each_gpu_once_and_ports_that_the_router_knows(tmp_path):
    write_split(tmp_path / "one", 2, 3)
    ports = {}
    for side, gpus in (("prefill", ["0", "1"]), ("decode", ["2,3", "4,5", "6,7"])):
        seen = run(tmp_path / "one" / f"vllm-{side}.sh", tmp_path / side, "vllm")
        assert sorted(seen) == gpus
        words = seen.values()
        ports[side] = sorted(of[of.index("--port") + 1] for of in words)
        roles = {json.loads(of[of.index("--kv-transfer-config") + 1])["kv_role"] for of in words}
        assert roles == {"kv_producer" if side == "prefill" else "kv_consumer"}
    router = run(tmp_path / "one" / "vllm-router.sh", tmp_path / "router", "vllm-router")[""]
    for side, used in ports.items():
        assert [router[i + 1] for i, word in enumerate(router) if word == f"--{side}"] == [
            f"http://127.0.0.1:{port}" for port in used
        ]
    assert "--vllm-pd-disaggregation" in router


def write_groups(folder, gpus=("H100", "L40S"), tps=(2, 1), replicas=(1, 5)):
    d = engine.mix(
        [
            deploy("llama-3.1-8b", gpu, tp=tp, replicas=n, limits=replace(LIMITS, max_num_seqs=64 * (i + 1)))
            for i, (gpu, tp, n) in enumerate(zip(gpus, tps, replicas, strict=True))
        ]
    )
    return write_launch(
        folder, d, name="mixed", scenario_text="name = 'x'\n", workload=WORKLOAD, rate_rps=4.0, claim="It serves."
    )


def test_each_group_has_a_script_and_the_gateway_has_their_ports(tmp_path):
    """Both groups fit one node: no GPU and no port is used twice."""
    made = write_groups(tmp_path / "one", gpus=("H100", "H100"), tps=(2, 1), replicas=(1, 3))
    assert {path.name for path in made} == {
        *(f"{engine}-group-{at}.sh" for engine in ("vllm", "sglang") for at in range(2)), "gateway.toml", "router.sh",
        "README.md", "load-test.sh", "scenario.toml", "trace.jsonl", "kubernetes.yaml",
    }  # fmt: skip
    ports = {}
    for at, (gpus, tp, seqs) in enumerate(((["0,1"], "2", "64"), (["2", "3", "4"], "1", "128"))):
        seen = run(tmp_path / "one" / f"vllm-group-{at}.sh", tmp_path / f"{at}", "vllm")
        assert sorted(seen) == gpus
        for words in seen.values():
            assert words[words.index("--tensor-parallel-size") + 1] == tp
            assert words[words.index("--max-num-seqs") + 1] == seqs
            ports[f"http://127.0.0.1:{words[words.index('--port') + 1]}"] = int(seqs)
    gateway = loads_gateway((tmp_path / "one" / "gateway.toml").read_text()).config
    assert {one.url: one.concurrency for one in gateway.engines} == ports
    words = run(tmp_path / "one" / "router.sh", tmp_path / "router", "lengthwise")[""]
    assert words == ["serve", f"{tmp_path / 'one'}/gateway.toml", "--host", "127.0.0.1"]
    load = run(tmp_path / "one" / "load-test.sh", tmp_path / "load", "vllm")[""]
    assert load[load.index("--base-url") + 1] == f"http://127.0.0.1:{gateway.listen.port}"


def test_groups_on_nodes_of_their_own_have_addresses_to_fill_in(tmp_path):
    write_groups(tmp_path / "one")
    gateway = loads_gateway((tmp_path / "one" / "gateway.toml").read_text()).config
    nodes = ["group-0-node-0:8001", *(f"group-1-node-0:{port}" for port in range(8002, 8006)), "group-1-node-1:8002"]
    assert [one.url for one in gateway.engines] == [f"http://{one}" for one in nodes]
    readme = (tmp_path / "one" / "README.md").read_text()
    assert "The groups share no node. Run the group-0 script on 1 node with H100 and the group-1 script on 2" in readme
    assert "First write the nodes' addresses into gateway.toml" in readme
    assert "- group-1: 5 x (tp 1, pp 1), on 5 x L40S" in readme
    assert "the nearest of the gateway is" not in readme  # round_robin is one of its routers
    assert "sh vllm-group-0.sh` and `sh vllm-group-1.sh" in readme
    assert "dynamo" not in readme.lower()
    assert "router nearest to the simulated" not in readme


@pytest.mark.parametrize(("host", "expected"), [({}, "127.0.0.1"), ({"HOST": "0.0.0.0"}, "0.0.0.0")])
def test_routers_listen_at_the_given_host(tmp_path, host, expected):
    write_split(tmp_path / "split", 1, 1)
    write(tmp_path / "equal")
    programs = {"split/vllm-router.sh": "vllm-router", "split/sglang-router.sh": "python3"}
    for script, program in (programs | {"equal/router.sh": "vllm-router"}).items():
        words = run(tmp_path / script, tmp_path / script.replace("/", "-"), program, **host)[""]
        assert words[words.index("--host") + 1] == expected


def test_sglang_engines_of_separate_sides_meet_at_their_bootstrap_ports(tmp_path):
    write_split(tmp_path / "one", 2, 1)
    seen = run(tmp_path / "one" / "sglang-prefill.sh", tmp_path / "prefill", "python3")
    known = [
        (f"http://127.0.0.1:{of[of.index('--port') + 1]}", of[of.index("--disaggregation-bootstrap-port") + 1])
        for of in seen.values()
    ]
    assert len({port for _, port in known}) == 2
    assert all(of[of.index("--disaggregation-mode") + 1] == "prefill" for of in seen.values())
    router = run(tmp_path / "one" / "sglang-router.sh", tmp_path / "router", "python3")[""]
    pairs = [tuple(router[i + 1 : i + 3]) for i, word in enumerate(router) if word == "--prefill"]
    assert pairs == sorted(known)


def test_sides_on_several_nodes_say_where_to_run_each(tmp_path):
    write_split(tmp_path / "one", 3, 2, tp=(4, 4))
    text = " ".join((tmp_path / "one" / "vllm-prefill.sh").read_text().replace("#", "").split())
    assert "A node has 2 of its 3 replicas: run this on each node, with HOST= its address." in text
    seen = run(tmp_path / "one" / "vllm-prefill.sh", tmp_path / "side", "vllm", HOST="10.0.0.7")
    assert sorted(seen) == ["0,1,2,3", "4,5,6,7"]
    addresses = {"PREFILLS": "http://a:1 http://b:2", "DECODES": "http://c:3"}
    words = run(tmp_path / "one" / "vllm-router.sh", tmp_path / "router", "vllm-router", **addresses)[""]
    assert words[-6:] == ["--prefill", "http://a:1", "--prefill", "http://b:2", "--decode", "http://c:3"]


def test_a_side_that_spans_hosts_is_named_with_its_steps(tmp_path):
    """The prefill replica is on one host, the decode replica on two."""
    made = {path.name for path in write_split(tmp_path / "one", 1, 1, tp=(1, 16))}
    assert {"kubernetes.yaml", "dynamo.yaml", "dynamo-sglang.yaml"} <= made
    text = (tmp_path / "one" / "README.md").read_text()
    assert "- Prefill side: 1 x (tp 1, pp 1), on 1 x H100 (dgx-h100)\n" in text
    assert "- Decode side: 1 x (tp 16, pp 1), on 16 x H100 (dgx-h100), each replica on 2 hosts\n" in text
    assert (
        "The sides share no node. Run the prefill script on 1 node with H100 and the decode script on 2 nodes with "
        "H100 (see the ranks below), with HOST= the node's address." in text
    )
    assert "PREFILLS and DECODES list the replicas' addresses on their nodes." in text
    ranks = (
        "- Decode side: A replica of 16 GPUs spans nodes of 8: the command must run on each of them, with its rank. "
        "Add --node-rank (0, 1, ...) and --master-addr on each"
    )
    assert ranks in text
    assert not any("--node-rank" in line for line in text.splitlines() if "Prefill side" in line)
    assert "Progress: `kubectl rollout status statefulset/split-prefill`." in text
    assert "`kubectl scale leaderworkerset/split-decode-pods --replicas=N`" in text
    assert "`--decode http://split-decode-pods-1.split-decode-pods:8000`" in text
    assert "\n## On Dynamo\n" in text
    assert "sh vllm-prefill.sh` and `sh vllm-decode.sh" in text


def test_sides_on_one_node_start_from_one_place(tmp_path):
    write_split(tmp_path / "one", 2, 3)
    text = (tmp_path / "one" / "README.md").read_text()
    assert "share no node" not in text
    assert "HOST=" not in text[: text.index("## What the engines do otherwise")]


def test_sides_with_other_gpus_start_on_nodes_of_their_own(tmp_path):
    """Two GPUs would fit one node, but no node has both kinds."""
    write_split(tmp_path / "one", 1, 1, tp=(1, 1), gpus=("H100", "H200"))
    text = (tmp_path / "one" / "README.md").read_text()
    assert "- Decode side: 1 x (tp 1, pp 1), on 1 x H200 (hgx-h200)" in text
    assert "Run the prefill script on 1 node with H100 and the decode script on 1 node with H200" in text
    assert "- KV transfer between the sides: simulated over infiniband-ndr, 48 GB/s for each GPU\n" in text
    assert "a network between the nodes of both sides" in text
    assert "NVLink, PCIe" not in text
    for side in ("prefill", "decode"):
        assert sorted(run(tmp_path / "one" / f"vllm-{side}.sh", tmp_path / side, "vllm")) == ["0"]


def test_each_data_parallel_rank_of_a_side_has_a_channel_of_its_own(tmp_path):
    """vLLM adds the rank's number to the port."""
    sides = [deploy("qwen3-30b-a3b", "H100", dp=dp, ep=dp, replicas=n, limits=LIMITS) for dp, n in ((2, 2), (4, 1))]
    d = engine.disaggregate(*sides)
    given = {"name": "ranks", "scenario_text": "name = 'x'\n", "workload": WORKLOAD, "rate_rps": 4.0, "claim": "x"}
    write_launch(tmp_path / "one", d, **given)
    script = (tmp_path / "one" / "vllm-prefill.sh").read_text()
    assert "serve 0,1 8100 5600 &\n" in script
    assert "serve 2,3 8101 5602 &\n" in script
    assert "--data-parallel-size 2" in script
    decode = (tmp_path / "one" / "vllm-decode.sh").read_text()
    assert "serve 4,5,6,7 8200 5700\n" in decode
    assert "--data-parallel-size 4" in decode
    assert "serve 2,3 8101 8999 &\n" in (tmp_path / "one" / "sglang-prefill.sh").read_text()


def test_an_engine_that_cannot_run_the_deployment_has_no_script(tmp_path):
    speculates = {"speculation": Speculation("eagle", 3, 0.6), "limits": replace(LIMITS, max_num_seqs=128)}
    experts = {"model": "mixtral-8x7b", "ep": 2}
    for name, options, has, lacks, reason in (
        ("speculates", speculates, "vllm", "sglang", "SGLang: a launch command of this engine does not model spec"),
        ("experts", experts, "sglang", "vllm", "vLLM: vLLM has experts on single GPUs or parts of each on all"),
    ):
        _, made = write(tmp_path / name, **options)
        names, text = {path.name for path in made}, (tmp_path / name / "README.md").read_text()
        assert f"{has}.sh" in names
        assert f"{lacks}.sh" not in names
        assert f"{lacks}.sh" not in text
        assert f"### Engines without a script\n\n- {reason}" in text
        assert ("kubernetes.yaml" in names) == (has == "vllm")
        assert f"Start the engine, `sh {has}.sh` (`MODEL=... sh {has}.sh` loads another checkpoint; flags of" in text
        program = {"vllm": "vllm", "sglang": "python3"}[has]
        assert len(run(tmp_path / name / f"{has}.sh", tmp_path / name / "seen", program)) == 2
    with pytest.raises(
        InputError, match=r"no engine has a launch command .*vLLM: .*ep must be .*; SGLang: .*speculative"
    ):
        write(tmp_path / "none", **(speculates | experts))
    assert not (tmp_path / "none").exists()


@given(st.text(max_size=80) | st.from_regex(r"[-_./A-Z0-9vlm]{0,70}", fullmatch=True))
@example("vllm")
@example("模型")
@example("3.1-" + "8" * 60)
@example("a" * 47 + "-b")
def test_the_name_of_any_model_becomes_one_that_kubernetes_accepts(name):
    made = dns_name(name)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,46}[a-z0-9])?", made)  # RFC 1035, with room for the longest suffix
    assert made != "vllm"
    assert dns_name(made) == made
