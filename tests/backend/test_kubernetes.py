from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from lengthwise import EngineLimits, Scheduler, deploy, engine
from lengthwise.backend import (
    dynamo_manifest,
    kubernetes_manifest,
    sglang_launch,
    sglang_split_launches,
    trtllm_launch,
    vllm_launch,
)
from lengthwise.backend.launch import gateway_toml
from lengthwise.backend.trtllm import trtllm_options
from lengthwise.config import loads_gateway
from lengthwise.policy import known
from lengthwise.policy import scheduler as named
from lengthwise.schema.deployment import KVOffloading, KVStorage, SglangSettings, TrtllmSettings
from lengthwise.schema.errors import InputError

LIMITS = EngineLimits(max_model_len=4096)
ENGINES = {
    "vllm": (vllm_launch, named("vllm_v1"), "vllm/vllm-openai"),
    "sglang": (sglang_launch, Scheduler(sglang=SglangSettings()), "lmsysorg/sglang"),
    "trtllm": (trtllm_launch, Scheduler(trtllm=TrtllmSettings()), "nvcr.io/nvidia/tensorrt-llm/release"),
}


def manifest(tp=2, pp=2, replicas=3, limits=LIMITS, engine="vllm", **options):
    scheduler = ENGINES[engine][1]
    d = deploy("llama-3.1-70b", "H100", tp=tp, pp=pp, replicas=replicas, limits=limits, scheduler=scheduler)
    return d, kubernetes_manifest(d, name="chat-70b", **options)


def by_kind(text):
    return {r["kind"]: r for r in yaml.safe_load_all(text)}


@pytest.mark.parametrize("token", [None, "hf-token"])
@pytest.mark.parametrize("version", ["1.30", "1.33", "1.37"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_api_would_take_every_resource(engine, version, token):
    _, text = manifest(engine=engine, token_secret=token)
    resources = list(yaml.safe_load_all(text))
    options = ["ConfigMap"] * (engine == "trtllm")
    assert [r["kind"] for r in resources] == [*options, "Service", "Service", "StatefulSet", "PodDisruptionBudget"]
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("storage", [None, KVStorage(), KVStorage(shared=True)])
def test_cpu_memory_and_storage_behind_the_cache_have_their_volumes(storage):
    offloading = KVOffloading(256.0, storage=storage)
    _, text = manifest(limits=EngineLimits(max_model_len=4096, enable_prefix_caching=True, kv_offloading=offloading))
    engine = by_kind(text)["StatefulSet"]
    for version in ("1.30", "1.37"):
        kubernetes_validate.validate(engine, version, strict=True)
    pod = engine["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    args = container["args"]
    shm_gib = int(volumes[mounts["/dev/shm"]]["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    # vLLM needs the complete CPU memory free in /dev/shm, beside what NCCL and PyTorch share there.
    assert 8 <= shm_gib - float(args[args.index("--kv-offloading-size") + 1]) < 9
    behind = shm_gib - 8  # what is in /dev/shm counts as the pod's memory
    assert container["resources"]["requests"]["memory"] == f"{4 * 16 + behind}Gi"
    assert container["resources"]["limits"]["memory"] == f"{4 * 32 + behind}Gi"
    assert (storage is not None) == ("/mnt/kv-cache" in mounts) == ("/mnt/kv-cache" in str(args))
    remarks = text[: text.index("---")].replace("\n# ", " ")
    if storage is None:
        return
    volume = volumes[mounts["/mnt/kv-cache"]]
    if storage.shared:
        assert volume["persistentVolumeClaim"] == {"claimName": "chat-70b-kv-cache"}
        assert "create the PersistentVolumeClaim chat-70b-kv-cache with access mode ReadWriteMany" in remarks
    else:
        assert volume["emptyDir"] == {}
        assert "an emptyDir on the node's disk, deleted with the pod" in remarks


EXPERTS = {"model": "mixtral-8x7b", "tp": 2, "dp": 4, "ep": 8}


@pytest.mark.parametrize(
    ("options", "processes", "gpus"),
    [
        ({"model": "llama-3.1-8b"}, 3, 1),  # API server, engine core, worker
        ({"model": "llama-3.1-70b", "tp": 2, "pp": 2}, 6, 4),
        (EXPERTS, 17, 8),  # by vLLM's page of its architecture, with the coordinator of the ranks
        ({"model": "llama-3.1-70b", "tp": 8, "pp": 2}, 10, 8),  # on each of two hosts
    ],
)
def test_an_engine_requests_a_core_for_each_process_and_memory_for_each_gpu(options, processes, gpus):
    text = kubernetes_manifest(deploy(gpu="H100", limits=LIMITS, **options), name="chat")
    (pod,) = [
        (one["spec"].get("template") or one["spec"]["leaderWorkerTemplate"]["leaderTemplate"])["spec"]
        for one in yaml.safe_load_all(text)
        if one["kind"] in ("StatefulSet", "LeaderWorkerSet")
    ]
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": str(2 * processes), "memory": f"{16 * gpus}Gi"},
        "limits": {"memory": f"{32 * gpus}Gi", "nvidia.com/gpu": gpus},
    }
    assert "defaults to change" in text[: text.index("---")]
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "8Gi"


def containers(value):
    """Yield every container of a resource."""
    if isinstance(value, dict):
        yield from value.get("containers", ())
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from containers(inner)


@pytest.mark.parametrize("name", ["split", "groups", "spanning"])
def test_every_container_requests_cpus_and_memory(name):
    resources = list(yaml.safe_load_all(kubernetes_manifest(globals()[name](), name="chat")))
    found = [one["resources"] for one in containers(resources)]
    assert len(found) == {"split": 3, "groups": 3, "spanning": 2}[name]
    for one in found:
        assert set(one["requests"]) == {"cpu", "memory"}
        assert "memory" in one["limits"]
        assert "cpu" not in one["limits"]


def test_a_misspelt_field_would_be_seen():
    """What the validation above is worth."""
    _, text = manifest()
    wrong = by_kind(text.replace("readinessProbe", "readynessProbe"))["StatefulSet"]
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


@pytest.mark.parametrize("name", ENGINES)
def test_a_pod_is_a_replica_with_its_gpus_and_the_command_of_its_engine(name):
    d, text = manifest(engine=name)
    resources = by_kind(text)
    engine = resources["StatefulSet"]["spec"]
    (container,) = engine["template"]["spec"]["containers"]
    assert engine["replicas"] == 3
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert (container["name"], container["image"].split(":")[0]) == (name, ENGINES[name][2])
    command = tuple(word.removeprefix("/etc/trtllm/") for word in container["command"] + container["args"])
    launch = ENGINES[name][0](d, host="0.0.0.0", port=8000)
    assert command[: len(launch.command)] == launch.command
    for note in launch.notes:
        assert " ".join(note.split()[:6]) in text.replace("\n# ", " ")


def test_the_options_of_tensorrt_llm_are_where_its_command_reads_them():
    d, text = manifest(engine="trtllm")
    resources = by_kind(text)
    pod = resources["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    path = container["args"][container["args"].index("--config") + 1]
    (mount,) = [one for one in container["volumeMounts"] if path.startswith(one["mountPath"])]
    (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
    assert volume["configMap"]["name"] == resources["ConfigMap"]["metadata"]["name"]
    data = resources["ConfigMap"]["data"][path.removeprefix(f"{mount['mountPath']}/")]
    assert yaml.safe_load(data) == yaml.safe_load(trtllm_options(d))
    assert "\n    kv_cache_config:\n" in text  # readable in the manifest, too


def test_sglang_has_the_time_that_its_health_check_takes():
    (container,) = by_kind(manifest(engine="sglang")[1])["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["timeoutSeconds"] > 20  # it waits up to 20 s for a token


@pytest.mark.parametrize("engine", ENGINES)
def test_an_image_that_runs_as_root_is_remarked(engine):
    _, text = manifest(engine=engine)
    context = by_kind(text)["StatefulSet"]["spec"]["template"]["spec"]["securityContext"]
    assert ("runAsNonRoot" in context) != ("The image runs as root" in text)


def test_a_pod_drains_before_it_is_killed():
    pod = by_kind(manifest()[1])["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    drain = int(container["args"][container["args"].index("--shutdown-timeout") + 1])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause + drain < pod["terminationGracePeriodSeconds"]


def test_services_and_budget_find_the_pods():
    resources = list(yaml.safe_load_all(manifest()[1]))
    engine = next(r for r in resources if r["kind"] == "StatefulSet")["spec"]
    labels = engine["template"]["metadata"]["labels"]
    services = [r for r in resources if r["kind"] == "Service"]
    assert all(s["spec"]["selector"] == labels for s in services)
    headless = next(s for s in services if s["spec"].get("clusterIP") == "None")
    assert engine["serviceName"] == headless["metadata"]["name"]
    budget = next(r for r in resources if r["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"] == labels


def test_no_secret_is_written_but_by_reference():
    (container,) = by_kind(manifest(token_secret="hf-token")[1])["StatefulSet"]["spec"]["template"]["spec"][
        "containers"
    ]
    (token,) = [e for e in container["env"] if e["name"] == "HF_TOKEN"]
    reference = {"name": "hf-token", "key": "token", "optional": True}
    assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}


@pytest.mark.parametrize("name", ["", "Chat", "-a", "a_b", "a" * 49, "a-", "a\n---\nkind: Secret"])
def test_names_that_kubernetes_refuses_are_refused(name):
    with pytest.raises(InputError, match="name must be"):
        kubernetes_manifest(deploy("llama-3.1-8b", "H100", limits=LIMITS), name=name)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_service_sets_variables_that_an_engine_reads(engine):
    """A Service `vllm` would set VLLM_PORT=tcp://..., with which vLLM does not start."""
    text = manifest(engine=engine)[1]
    assert by_kind(text)["StatefulSet"]["spec"]["template"]["spec"]["enableServiceLinks"] is False
    with pytest.raises(InputError, match="VLLM_PORT"):
        kubernetes_manifest(deploy("llama-3.1-8b", "H100", limits=LIMITS), name="vllm")


@pytest.mark.parametrize("gpu", ["MI300X", "TPU7x", "TPU-v6e", "Gaudi-3"])
def test_what_is_no_nvidia_gpu_is_refused_and_the_scripts_say_why(gpu):
    deployed = deploy("llama-3.1-8b", gpu, limits=LIMITS)
    with pytest.raises(InputError, match="NVIDIA"):
        kubernetes_manifest(deployed, name="chat")
    for launch in (vllm_launch, sglang_launch, trtllm_launch):
        notes = launch(deployed).notes
        assert any("for NVIDIA GPUs" in note and "Kubernetes manifest" in note for note in notes)


def test_an_unknown_checkpoint_must_be_given():
    d = deploy("gpt3-39b", "H100", tp=2)
    with pytest.raises(InputError, match="Give model"):
        kubernetes_manifest(d, name="chat")
    assert "mine/gpt3" in kubernetes_manifest(d, name="chat", model="mine/gpt3")


def split(prefills=2, decodes=3, tp=1):
    """A deployment whose prefill and decode replicas are separate."""
    sides = (
        deploy("llama-3.1-8b", "H100", tp=of, replicas=n, limits=LIMITS) for of, n in ((1, prefills), (tp, decodes))
    )
    return engine.disaggregate(*sides)


@pytest.mark.parametrize("version", ["1.30", "1.33", "1.37"])
def test_the_api_would_take_every_resource_of_separate_sides(version):
    resources = list(yaml.safe_load_all(kubernetes_manifest(split(), name="chat", token_secret="hf-token")))
    side = ["Service", "StatefulSet", "PodDisruptionBudget"]
    assert [r["kind"] for r in resources] == ["Service", "Deployment", *side, *side]
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)


def test_each_side_has_its_pods_and_the_router_knows_them_all():
    d = split(tp=2)
    text = kubernetes_manifest(d, name="chat")
    named = {(r["kind"], r["metadata"]["name"]): r["spec"] for r in yaml.safe_load_all(text)}
    (router,) = named["Deployment", "chat-router"]["template"]["spec"]["containers"]
    words = router["command"][-1].split()
    for role, count, gpus, kv_role in (("prefill", 2, 1, "kv_producer"), ("decode", 3, 2, "kv_consumer")):
        spec = named["StatefulSet", f"chat-{role}"]
        assert spec["replicas"] == count
        labels = spec["template"]["metadata"]["labels"]
        assert labels["llm-d.ai/role"] == role
        assert named["Service", spec["serviceName"]]["selector"].items() <= labels.items()
        (container,) = spec["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        args = container["args"]
        transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
        assert transfer == {"kv_connector": "NixlConnector", "kv_role": kv_role}
        (host,) = [one for one in container["env"] if one["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST"]
        assert host["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        own = [words[i + 1] for i, word in enumerate(words) if word == f"--{role}"]
        assert own == [f"http://chat-{role}-{i}.{spec['serviceName']}:8000" for i in range(count)]
    # Requests go to the router, and to no pod of a side.
    assert named["Service", "chat"]["selector"].items() <= (
        named["Deployment", "chat-router"]["template"]["metadata"]["labels"].items()
    )


def groups(*, gpus=("H100", "L40S"), tps=(2, 1), replicas=(1, 3), router="shortest_expected_delay"):
    """Unlike replicas behind one router."""
    scheduler = replace(named("vllm_v1"), router=router)
    return engine.mix(
        [
            deploy("llama-3.1-8b", gpu, tp=tp, replicas=n, limits=LIMITS, scheduler=scheduler)
            for gpu, tp, n in zip(gpus, tps, replicas, strict=True)
        ]
    )


@pytest.mark.parametrize("version", ["1.30", "1.33", "1.37"])
def test_groups_have_their_pods_behind_a_gateway_that_has_all_addresses(version):
    text = kubernetes_manifest(groups(), name="chat", token_secret="hf-token")
    resources = list(yaml.safe_load_all(text))
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)
    named_of = {(one["kind"], one["metadata"]["name"]): one for one in resources}
    config = loads_gateway(named_of["ConfigMap", "chat-router"]["data"]["gateway.toml"]).config
    found = {one.url: one.concurrency for one in config.engines}
    assert found == dict.fromkeys(
        [
            "http://chat-group-0-0.chat-group-0-pods:8000",
            *(f"http://chat-group-1-{i}.chat-group-1-pods:8000" for i in range(3)),
        ],
        256,
    )
    for at, (product, count, gpus) in enumerate((("NVIDIA-H100-80GB-HBM3", 1, 2), ("NVIDIA-L40S", 3, 1))):
        spec = named_of["StatefulSet", f"chat-group-{at}"]["spec"]
        pod = spec["template"]["spec"]
        assert spec["replicas"] == count
        assert product in str(pod["affinity"])
        assert "VLLM_NIXL" not in str(pod)
        assert "llm-d" not in str(spec)
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert container["args"][container["args"].index("--tensor-parallel-size") + 1] == str(gpus)
    router = named_of["Deployment", "chat-router"]["spec"]["template"]
    (container,) = router["spec"]["containers"]
    (path,) = container["args"]
    assert path == f"{container['volumeMounts'][0]['mountPath']}/gateway.toml"
    assert config.listen.host == "0.0.0.0"
    assert config.listen.port == container["ports"][0]["containerPort"]
    assert named_of["Service", "chat"]["spec"]["selector"].items() <= router["metadata"]["labels"].items()


@pytest.mark.parametrize("router", [name for name in known("router") if name not in ("vllm_internal", "central")])
def test_the_gateway_takes_the_router_of_every_simulated_one(router):
    text = gateway_toml(groups(router=router), {"a": ["http://a"], "b": ["http://b"]}, host="::1", admin_port=9)
    (name,) = re.findall('^router = "(.*)"$', text, re.MULTILINE)
    assert loads_gateway(text).config.dispatch.router == name
    if router not in ("shortest_expected_delay", "least_work_left", "prefix_precise"):
        assert name == router


FIELDS = tomllib.loads((Path(__file__).parent / "crd_fields.toml").read_text())
TYPES = {"integer": int, "string": str, "boolean": bool, "object": dict, "array": list}


def validate_fields(value, table, where="spec"):
    """Check an object of a custom resource against the fields that its API publishes."""
    known = {name.removesuffix("!"): kind for name, kind in FIELDS[table].items()}
    missing = {name[:-1] for name in FIELDS[table] if name.endswith("!")} - set(value)
    assert not missing, f"{where} lacks {missing}"
    assert set(value) <= set(known), f"{where} has unknown fields {set(value) - set(known)}"
    for name, of in value.items():
        kind = known[name]
        if kind == "pod":
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"} | of.get("metadata", {})}
            for version in ("1.30", "1.37"):
                kubernetes_validate.validate(pod | {"spec": of["spec"]}, version, strict=True)
        elif isinstance(kind, list) and kind[0] in FIELDS:
            for one in of:
                validate_fields(one, kind[0], f"{where}.{name}")
        elif isinstance(kind, list):
            assert of in kind, f"{where}.{name} is {of}"
        elif kind in FIELDS:
            validate_fields(of, kind, f"{where}.{name}")
        else:
            assert type(of) is TYPES[kind], f"{where}.{name} is {of!r}"


def validate(resource):
    """Check any resource that a manifest has, strictly."""
    if resource["kind"] not in FIELDS:
        kubernetes_validate.validate(resource, "1.37", strict=True)
        return
    versions = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1", "DynamoGraphDeployment": "nvidia.com/v1beta1"}
    assert resource["apiVersion"] == versions[resource["kind"]]
    validate_fields(resource["spec"], resource["kind"])


def test_wrong_fields_of_a_custom_resource_would_be_seen():
    """What the validation is worth."""
    text = kubernetes_manifest(spanning(), name="chat")
    (good,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "LeaderWorkerSet"]
    validate(good)
    for wrong in ("size: 2 -> sise: 2", "LeaderCreated -> Leader", "size: 2 -> size: two", "image: -> imagine:"):
        changed = yaml.safe_load(yaml.safe_dump(good).replace(*wrong.split(" -> ")))
        with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
            validate(changed)


def spanning(**options):
    """Two replicas of 16 GPUs, each on two hosts."""
    options = {"tp": 8, "pp": 2, "replicas": 2, "limits": LIMITS} | options
    return deploy("llama-3.1-70b", "H100", **options)


@pytest.mark.parametrize("rules", [None, SglangSettings()])
def test_a_replica_that_spans_hosts_is_a_group_of_pods_whose_first_has_the_server(rules):
    d = spanning(scheduler=Scheduler(sglang=rules)) if rules else spanning()
    resources = list(yaml.safe_load_all(kubernetes_manifest(d, name="chat", token_secret="hf-token")))
    assert [one["kind"] for one in resources] == ["Service", "LeaderWorkerSet", "PodDisruptionBudget"]
    for resource in resources:
        validate(resource)
    service, group, _ = resources
    comments = [one for one in kubernetes_manifest(d, name="chat").splitlines() if one.startswith("#")]
    assert not re.search("node-rank|must run on each", " ".join(comments)), "LWS gives the ranks"
    spec = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], spec["size"]) == (2, 2)
    (leader,), (worker,) = (spec[key]["spec"]["containers"] for key in ("leaderTemplate", "workerTemplate"))
    assert leader["resources"] == worker["resources"]
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == 8
    words = leader["args"]
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--node-rank") + 1] == "$(LWS_WORKER_INDEX)"
    assert any("$(LWS_LEADER_ADDRESS)" in word for word in words)
    assert worker["args"] == words + ([] if rules else ["--headless"])
    assert "readinessProbe" in leader
    assert not {"readinessProbe", "livenessProbe", "startupProbe", "ports"} & set(worker)
    # LWS makes a headless Service with the set's name, and gives its first pods the index 0.
    assert service["metadata"]["name"] != group["metadata"]["name"]
    labels = spec["leaderTemplate"]["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert service["spec"]["selector"].items() <= labels.items()


def test_replicas_that_no_group_of_pods_can_have_are_refused():
    with pytest.raises(InputError, match=r"a pod of TensorRT-LLM must fit a host: a replica of 16 GPUs .* Lower tp"):
        kubernetes_manifest(spanning(scheduler=Scheduler(trtllm=TrtllmSettings())), name="chat")
    with pytest.raises(InputError, match="must divide evenly over its hosts; 20 GPUs are on 3 hosts with up to 8"):
        kubernetes_manifest(spanning(tp=4, pp=5), name="chat")


def unlike_sides(tp=(8, 16)):
    sides = (
        deploy("llama-3.1-70b", gpu, tp=of, replicas=n, limits=LIMITS)
        for gpu, of, n in zip(("H100", "H200"), tp, (2, 1), strict=True)
    )
    return engine.disaggregate(*sides)


def wide_decode():
    """A prefill replica of eight GPUs by tensor parallelism, and a decode replica of 16 ranks on two hosts."""
    limits = replace(LIMITS, weight_dtype="fp8", max_num_seqs=64)
    own = {"dp": 16, "ep": 16, "all2all_backend": "deepep_low_latency"}
    sides = (deploy("deepseek-v3", "H200", limits=limits, **of) for of in ({"tp": 8, "ep": 8}, own))
    return engine.disaggregate(*sides)


def test_the_ranks_of_a_decode_side_are_in_one_group_of_pods():
    resources = list(yaml.safe_load_all(kubernetes_manifest(wide_decode(), name="chat")))
    for resource in resources:
        validate(resource)
    (group,) = [one["spec"]["leaderWorkerTemplate"] for one in resources if one["kind"] == "LeaderWorkerSet"]
    assert group["size"] == 2
    for part in ("leaderTemplate", "workerTemplate"):
        (container,) = group[part]["spec"]["containers"]
        args = container["args"]
        assert args[args.index("--data-parallel-size") + 1] == "16"
        assert args[args.index("--all2all-backend") + 1] == "deepep_low_latency"
        assert "--enable-expert-parallel" in args


def test_pods_of_unlike_sides_take_nodes_with_their_gpus_and_the_router_knows_groups():
    text = kubernetes_manifest(unlike_sides(), name="chat")
    resources = list(yaml.safe_load_all(text))
    for resource in resources:
        validate(resource)
    named = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in resources}
    prefill = named["StatefulSet", "chat-prefill"]["template"]["spec"]
    template = named["LeaderWorkerSet", "chat-decode-pods"]["leaderWorkerTemplate"]
    for pod, product in (
        (prefill, "NVIDIA-H100-80GB-HBM3"),
        (template["leaderTemplate"]["spec"], "NVIDIA-H200"),
        (template["workerTemplate"]["spec"], "NVIDIA-H200"),
    ):
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"][0]["matchExpressions"]
        assert (term["key"], term["operator"], term["values"]) == ("nvidia.com/gpu.product", "In", [product])
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in {one["name"] for one in pod["containers"][0]["env"]}
    (router,) = named["Deployment", "chat-router"]["template"]["spec"]["containers"]
    words = router["command"][-1].split()
    urls = [words[i + 1] for i, word in enumerate(words) if word in ("--prefill", "--decode")]
    assert urls == [
        *(f"http://chat-prefill-{i}.chat-prefill-pods:8000" for i in range(2)),
        "http://chat-decode-pods-0.chat-decode-pods:8000",
    ]
    remarks = text[: text.index("---")].replace("\n# ", " ")
    assert "A replica spans hosts (decode: 2 hosts): a LeaderWorkerSet" in remarks
    assert "Nodes must have NVIDIA H100 80GB HBM3; NVIDIA H200." in remarks


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "d", [spanning(), unlike_sides(), split(tp=2), wide_decode()], ids=["spanning", "unlike", "split", "wide"]
)
def test_a_dynamo_graph_has_a_frontend_and_the_workers_of_each_side(d, engine):
    (graph,) = yaml.safe_load_all(dynamo_manifest(d, name="chat", token_secret="hf-token", engine=engine))
    validate(graph)
    assert graph["spec"]["backendFramework"] == engine
    launches = [vllm_launch(side) for side in d.sides]
    if engine == "sglang":
        own = {"host": "0.0.0.0"}
        launches = [sglang_launch(d, **own)] if d.decode is None else sglang_split_launches(*d.sides, **own)
    parts = {one["name"]: one for one in graph["spec"]["components"]}
    roles = ["worker"] if d.decode is None else ["prefill", "decode"]
    assert list(parts) == ["frontend", *roles] == [one["type"] for one in parts.values()]
    for role, side, launch in zip(roles, d.sides, launches, strict=True):
        part, hosts = parts[role], -(-side.parallel.gpus_per_replica // 8)
        assert part["replicas"] == side.parallel.replicas
        assert part.get("multinode", {"nodeCount": 1}) == {"nodeCount": hosts}
        (container,) = part["podTemplate"]["spec"]["containers"]
        assert container["name"] == "main"
        assert container["resources"]["limits"]["nvidia.com/gpu"] * hosts == side.parallel.gpus_per_replica
        args = container["args"]
        assert container["command"] == ["python3", "-m", f"dynamo.{engine}"]
        assert container["image"].startswith(f"nvcr.io/nvidia/ai-dynamo/{engine}-runtime:")
        if d.decode is not None:
            assert args[args.index("--disaggregation-mode") + 1] == role
        if engine == "sglang":
            flags = list(launch.command[3:])
            for gone in ("--port", "--nnodes"):
                if gone in flags:
                    del flags[flags.index(gone) : flags.index(gone) + 2]
            assert args == flags
            assert args[args.index("--host") + 1] == "0.0.0.0", "the decode side asks a prefill replica for its port"
            continue
        assert args[:2] == ["--model", launch.command[2]]
        expected = [one for one in launch.command[3:] if one.startswith("--") and one not in ("--host", "--port")]
        assert [one for one in expected if one != "--nnodes"] == [one for one in args[2:] if one in expected]
        assert not {"--host", "--port", "--nnodes"} & set(args)
        assert ("affinity" in part["podTemplate"]["spec"]) == (len(d.gpus_by_name) > 1)


def test_a_dynamo_graph_is_refused_as_other_manifests_are():
    with pytest.raises(InputError, match="name must be at most 48"):
        dynamo_manifest(split(), name="Chat", token_secret="x")
    with pytest.raises(InputError, match="needs NVIDIA GPUs; MI300X is not one"):
        dynamo_manifest(deploy("llama-3.1-8b", "MI300X", limits=LIMITS), name="chat", token_secret="x")
