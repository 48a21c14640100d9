from __future__ import annotations

import kubernetes_validate
import pytest
import yaml

from lengthwise import EngineLimits, deploy
from lengthwise.backend import kubernetes_manifest, vllm_launch
from lengthwise.schema.deployment import KVOffloading, KVStorage
from lengthwise.schema.errors import InputError

LIMITS = EngineLimits(max_model_len=4096)


def manifest(tp=2, pp=2, replicas=3, limits=LIMITS, **options):
    d = deploy("llama-3.1-70b", "H100", tp=tp, pp=pp, replicas=replicas, limits=limits)
    return d, kubernetes_manifest(d, name="chat-70b", **options)


def by_kind(text):
    return {r["kind"]: r for r in yaml.safe_load_all(text)}


@pytest.mark.parametrize("token", [None, "hf-token"])
@pytest.mark.parametrize("version", ["1.30", "1.33", "1.37"])
def test_the_api_would_take_every_resource(version, token):
    _, text = manifest(token_secret=token)
    resources = list(yaml.safe_load_all(text))
    assert [r["kind"] for r in resources] == ["Service", "Service", "StatefulSet", "PodDisruptionBudget"]
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
    assert container["resources"]["requests"]["memory"] == f"{shm_gib}Gi"
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


def test_no_memory_is_reserved_without_cpu_memory_behind_the_cache():
    pod = by_kind(manifest()[1])["StatefulSet"]["spec"]["template"]["spec"]
    assert "requests" not in pod["containers"][0]["resources"]
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "8Gi"


def test_a_misspelt_field_would_be_seen():
    """What the validation above is worth."""
    _, text = manifest()
    wrong = by_kind(text.replace("readinessProbe", "readynessProbe"))["StatefulSet"]
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_a_pod_is_a_replica_with_its_gpus_and_its_command():
    d, text = manifest()
    resources = by_kind(text)
    engine = resources["StatefulSet"]["spec"]
    (container,) = engine["template"]["spec"]["containers"]
    assert engine["replicas"] == 3
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    command = tuple(container["command"] + container["args"])
    launch = vllm_launch(d, host="0.0.0.0", port=8000)
    assert command[: len(launch.command)] == launch.command
    for note in launch.notes:
        assert " ".join(note.split()[:6]) in text.replace("\n# ", " ")


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
    assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token"}}}


def test_a_replica_larger_than_a_node_names_what_can_hold_it():
    d = deploy("llama-3.1-405b", "H100", tp=8, pp=2, limits=LIMITS)
    with pytest.raises(InputError, match="LeaderWorkerSet"):
        kubernetes_manifest(d, name="large")


@pytest.mark.parametrize("name", ["", "Chat", "-a", "a_b", "a" * 49, "a-", "a\n---\nkind: Secret"])
def test_names_that_kubernetes_refuses_are_refused(name):
    with pytest.raises(InputError, match="name must be"):
        kubernetes_manifest(deploy("llama-3.1-8b", "H100", limits=LIMITS), name=name)


def test_what_is_no_nvidia_gpu_is_refused():
    with pytest.raises(InputError, match="NVIDIA"):
        kubernetes_manifest(deploy("llama-3.1-8b", "MI300X", limits=LIMITS), name="chat")


def test_an_unknown_checkpoint_must_be_given():
    d = deploy("gpt3-39b", "H100", tp=2)
    with pytest.raises(InputError, match="Give model"):
        kubernetes_manifest(d, name="chat")
    assert "mine/gpt3" in kubernetes_manifest(d, name="chat", model="mine/gpt3")
