"""Kubernetes resources of a deployment: one pod for each replica, with the engine whose rules were simulated.

A replica that spans hosts is a group of pods of a LeaderWorkerSet. A DynamoGraphDeployment is a second way to serve it.
Fields: https://kubernetes.io/docs/reference/kubernetes-api/, https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/
and https://docs.nvidia.com/dynamo/v1.5.0/reference/api/kubernetes/dynamo-graph-deployment. GPUs and user of vLLM's
image: https://docs.vllm.ai/en/stable/deployment/k8s/ and .../deployment/docker/. The other images:
https://docs.sglang.io/docs/get-started/install and https://nvidia.github.io/TensorRT-LLM/installation/containers.html.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.backend.launch import (
    PLACEHOLDER,
    Launch,
    comment,
    fits_node,
    gateway_toml,
    of_one_replica,
    replica_gpus,
    roles,
    router_policy,
)
from lengthwise.backend.sglang import sglang_launch, sglang_split_launches
from lengthwise.backend.trtllm import OPTIONS, trtllm_launch, trtllm_options
from lengthwise.backend.vllm import CONNECTOR, STORAGE_FOLDER, disaggregated_notes, split_launches, vllm_launch
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import GB, GIB

PORT = 8000
DRAIN_S = 120  # seconds that a stopping pod has to finish its requests
LEAVE_S = 10  # seconds until a stopping pod is out of the Service's endpoints
LOAD_S = 3600  # longest time to download, load and compile
SHM_GIB = 8  # shared memory of NCCL and PyTorch
OPTIONS_FOLDER, GATEWAY_FILE = "/etc/trtllm", "gateway.toml"
VLLM_IMAGE = "vllm/vllm-openai:v0.32.0"
# Processes and cores of an engine: vLLM's pages Architecture Overview and Optimization and Tuning (CPU Resources for
# GPU Deployments). Memory: the examples of https://github.com/vllm-project/production-stack (helm/README.md).
CPUS_PER_PROCESS, REQUEST_GIB, LIMIT_GIB = 2, 16, 32
_RESOURCES_REMARK = (
    f"CPUs and memory are defaults to change. An engine's pod requests {CPUS_PER_PROCESS} CPUs, a core, for each of "
    "its processes: API server, engine core (SGLang: detokenizer) and a worker for each GPU, with dp the first two for "
    "each rank, and a coordinator; vLLM's documentation names this as the minimum. A limit of CPUs would pause the "
    f"engine within a step, so there is none. It requests {REQUEST_GIB} GiB of memory for each GPU and may use "
    f"{LIMIT_GIB}, as in the Helm chart of vLLM's production stack, besides CPU memory behind the prefix cache."
)
ROUTER_RESOURCES = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
GATEWAY_IMAGE = "lengthwise-gateway:0.2.0"
GATEWAY_RESOURCES = {"requests": {"cpu": "1", "memory": "768Mi"}, "limits": {"memory": "1536Mi"}}  # as in deploy/
CHANNEL_PORT = 5600  # of the side channel by which vLLM's decode engines find blocks of a prefill engine
ROUTER = "vllm-router==0.1.17"
# Labels of llm-d: https://llm-d.ai/docs/architecture/advanced/disaggregation
LLM_D_ROLE, LLM_D_SERVING = "llm-d.ai/role", "llm-d.ai/inference-serving"
TOKEN_SECRET = "hugging-face"  # noqa: S105 - the name of a Secret, as in deploy/
LWS_WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"  # label that LWS sets
_RANK = "--node-rank"
_RANKS = {
    "": ("--master-addr", "$(LWS_LEADER_ADDRESS)", _RANK),
    "sglang": ("--dist-init-addr", "$(LWS_LEADER_ADDRESS):5000", _RANK),
}
"""Arguments by which the engines of a group meet, before the rank of each."""
_OF_SERVERS = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
RESERVED = "vllm"  # no name for a Service: vLLM reads VLLM_PORT, which Kubernetes sets to tcp://... for it
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,46}[a-z0-9])?")


@dataclass(frozen=True)
class PodEngine:
    """An engine in a pod."""

    title: str
    launch: Callable[..., Launch]  # returns its command
    words: int  # words of the command before its arguments
    image: str
    home: str = "/root"
    user: int | None = None  # the image's own user, of group 0, or None if it runs as root
    # Arguments with which it ends its requests before it exits. Without any it waits for them by itself.
    drain: tuple[str, ...] = ()
    health_s: int = 1  # longest answer of its health check

    @property
    def release(self) -> str:
        """Return the engine and the version of its image, for which the flags are."""
        return f"{self.title} {self.image.rpartition(':')[2].removeprefix('v')}"


ENGINES = {
    "": PodEngine("vLLM", vllm_launch, 2, VLLM_IMAGE, "/home/vllm", 2000, ("--shutdown-timeout", str(DRAIN_S))),
    # Its health check generates a token: it takes 1 to 20 s.
    "sglang": PodEngine("SGLang", sglang_launch, 3, "lmsysorg/sglang:v0.5.23", health_s=25),
    "trtllm": PodEngine("TensorRT-LLM", trtllm_launch, 2, "nvcr.io/nvidia/tensorrt-llm/release:1.2.0"),
}


def pod_engine(deployment: Deployment) -> PodEngine:
    """Return the engine of a deployment's pods: SGLang or TensorRT-LLM if its rules were simulated, otherwise vLLM."""
    return ENGINES[deployment.scheduler.engine_rules]


def kubernetes_manifest(
    deployment: Deployment,
    *,
    name: str,
    model: str | None = None,
    image: str | None = None,
    token_secret: str | None = None,
) -> str:
    """Return the YAML of a StatefulSet with the engine (``pod_engine``), its Services and its disruption budget.

    Replicas that span hosts are a LeaderWorkerSet instead, with a pod on each host. If prefill and decode replicas are
    separate, each side has these, with vLLM, and a router is in front of both; each group of unlike replicas has them
    too, behind lengthwise's gateway. The resources are called ``name``: at most 48 lower-case letters, digits and
    hyphens, with a letter first and no hyphen last. A ConfigMap has the options of TensorRT-LLM. ``model`` is the
    checkpoint, by default the catalog's. ``token_secret`` names a Secret with a Hugging Face token under the key
    ``token``; without the Secret, pods start without a token. Raises InputError if the name is invalid or "vllm", a
    replica's GPUs cannot be divided over hosts, the GPUs are not NVIDIA's, or no checkpoint is known.
    """
    d, engine = deployment, pod_engine(deployment)
    sides = dict(zip(roles(d), d.sides, strict=True))
    options: dict[str, Any] = {"model": model, "host": "0.0.0.0", "port": PORT}  # noqa: S104 - a pod's own
    if d.decode is None:
        launches = [engine.launch(side, **options) for side in of_one_replica(d)]
    else:
        launches = [*split_launches(*sides.values(), notes=disaggregated_notes(d), **options)]
    _check(d, name, launches[0])
    resources: list[dict[str, Any]] = []
    if len(sides) > 1:
        resources += _router_resources(d, name, image or engine.image)
    is_mixed = len({side.gpu.name for side in d.sides}) > 1
    for (role, side), launch in zip(sides.items(), launches, strict=True):
        pod = _pod(side, launch, image or engine.image, token_secret, name)
        pod |= _node_affinity(side) if is_mixed else {}
        resources += _engine_resources(side, name, role, pod)
    if OPTIONS in launches[0].command:
        metadata: dict[str, Any] = {"name": name, "labels": _labels(name, "engine")}
        config: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        resources.insert(0, config | {"data": {OPTIONS: trtllm_options(d, model)}})
    remarks = (
        *_shape_remarks(d, engine),
        _RESOURCES_REMARK,
        _node_remark(d, is_mixed=is_mixed),
        "The model is kept in an emptyDir: mount a PersistentVolumeClaim there to load it once.",
        *(["The image runs as root, which the Pod Security level `restricted` refuses."] if not engine.user else []),
        *_storage_remarks(d, name),
        # A LeaderWorkerSet gives the ranks.
        *dict.fromkeys(note for launch in launches for note in launch.notes if _RANK not in note),
    )
    return "\n#\n".join(comment(remark) for remark in remarks) + f"\n{_yaml(resources)}"


def _check(d: Deployment, name: str, launch: Launch) -> None:
    _check_name(name)
    if not is_nvidia(d):
        other = next(side.gpu.name for side in d.sides if not side.gpu.is_nvidia)
        raise InputError(f"a manifest needs NVIDIA GPUs; {other} is not one. Run the scripts instead")
    for side in d.sides:
        if reason := spanning_problem(side):
            raise InputError(reason)
    if PLACEHOLDER in launch.command:
        raise InputError(f"a manifest needs a checkpoint; none is known for {d.model.name}. Give model")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InputError(
            f"name must be at most 48 lower-case letters, digits and hyphens and start with a letter; it is {name!r}"
        )
    if name == RESERVED:
        raise InputError(
            f"name must not be {name!r}: Kubernetes gives pods the variable VLLM_PORT for a Service of this name, and "
            "vLLM does not start with it. Choose another name"
        )


def spanning_problem(side: Deployment) -> str:
    """Return why the replicas of a side cannot be groups of pods, one on each host, or "" if they can."""
    gpus, hosts = replica_gpus(side), hosts_of(side)
    if hosts > 1 and side.scheduler.engine_rules == "trtllm":
        return (
            f"a pod of TensorRT-LLM must fit a host: a replica of {gpus} GPUs does not fit the {side.node.host_gpus} "
            f"of {side.node.name}. Lower tp or pp, or start it with MPI yourself"
        )
    if gpus % hosts:
        return (
            f"the GPUs of a replica must divide evenly over its hosts; {gpus} GPUs are on {hosts} hosts with up to "
            f"{side.node.host_gpus}. Change tp, pp or dp"
        )
    return ""


def hosts_of(side: Deployment) -> int:
    """Return the number of hosts that a replica spans."""
    return -(-replica_gpus(side) // side.node.host_gpus)


def pod_hosts(side: Deployment, name: str) -> list[str]:
    """Return the host name of each replica's pod, or of the first pod of each that spans hosts.

    ``name`` is that of the side's resources.
    """
    pods = f"{name}-pods"
    return [f"{name if fits_node(side) else pods}-{i}.{pods}" for i in range(side.parallel.replicas)]


def _labels(name: str, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/component": component}


def _resource(version: str, kind: str, name: str, labels: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    # A copy of the labels: YAML would write an anchor and aliases for one dictionary in many places.
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": dict(labels)}, "spec": spec}


def _engine_resources(d: Deployment, name: str, role: str, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the resources of the engines of one side or one group (by its role), or of all engines ("engine")."""
    labels, own, resources = _labels(name, role), name if role == "engine" else f"{name}-{role}", []
    spans = not fits_node(d)
    leaders = {LWS_WORKER_INDEX: "0"} if spans else {}  # only the first pod of a group answers requests
    service = {"selector": labels | leaders, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]}
    headless = {"clusterIP": "None", "publishNotReadyAddresses": False, **copy.deepcopy(service)}
    if role == "engine":
        resources.append(_resource("v1", "Service", own, labels, service))
    pod_labels = dict(labels)
    if role in ("prefill", "decode"):
        pod_labels |= {LLM_D_ROLE: role, LLM_D_SERVING: "true"}
        (container,) = pod["containers"]
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        container["env"] += [
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(CHANNEL_PORT)},
        ]
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": dict(labels)}}
    disruptions = _resource("policy/v1", "PodDisruptionBudget", own, labels, budget)
    if spans:
        return [*resources, _leader_worker_set(d, f"{own}-pods", labels, pod_labels, pod), disruptions]
    stateful_set = {
        "replicas": d.parallel.replicas,
        "serviceName": f"{own}-pods",
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": dict(labels)},
        "template": {"metadata": {"labels": pod_labels}, "spec": pod},
    }
    return [
        *resources,
        _resource("v1", "Service", f"{own}-pods", labels, headless),
        _resource("apps/v1", "StatefulSet", own, labels, stateful_set),
        disruptions,
    ]


def _leader_worker_set(
    d: Deployment, name: str, labels: dict[str, str], pod_labels: dict[str, str], pod: dict[str, Any]
) -> dict[str, Any]:
    """Return a set of groups of pods, one group a replica and one pod a host. LWS makes the headless Service ``name``.

    Only the first pod of a group, its leader, has a server. LWS gives all of them its address and their rank.
    """
    (leader,) = pod["containers"]
    leader["args"] += [*_RANKS[d.scheduler.engine_rules], "$(LWS_WORKER_INDEX)"]
    worker = {key: copy.deepcopy(value) for key, value in leader.items() if key not in _OF_SERVERS}
    worker["args"] += ["--headless"] if not d.scheduler.engine_rules else []
    template = {"metadata": {"labels": dict(pod_labels)}, "spec": pod}
    group = {
        "size": hosts_of(d),
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": template,
        "workerTemplate": {
            "metadata": {"labels": dict(pod_labels)}, "spec": copy.deepcopy(pod) | {"containers": [worker]},
        },
    }  # fmt: skip
    spec = {"replicas": d.parallel.replicas, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": group}
    return _resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, labels, spec)


def _router_resources(d: Deployment, name: str, image: str) -> list[dict[str, Any]]:
    """Return the Service that receives requests, and its router: vllm-router for two sides, the gateway for groups."""
    labels, resources = _labels(name, "router"), list[dict[str, Any]]()
    urls = {
        role: [f"http://{host}:{PORT}" for host in pod_hosts(side, f"{name}-{role}")]
        for role, side in zip(roles(d), d.sides, strict=True)
    }
    container: dict[str, Any] = {
        "name": "router",
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 5},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    user = {"runAsNonRoot": True, "runAsUser": 2000, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}}
    more: dict[str, Any] = {}
    if d.groups:
        text = gateway_toml(d, urls, host="0.0.0.0", admin_port=PORT + 1)  # noqa: S104 - a pod's own
        metadata = {"name": f"{name}-router", "labels": dict(labels)}
        resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {GATEWAY_FILE: text}})
        container |= {"image": GATEWAY_IMAGE, "args": [f"/etc/lengthwise/{GATEWAY_FILE}"]}
        container |= {"resources": copy.deepcopy(GATEWAY_RESOURCES)}
        container["volumeMounts"] = [{"name": "config", "mountPath": "/etc/lengthwise"}]
        container["readinessProbe"] = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 5}
        more["volumes"] = [{"name": "config", "configMap": {"name": f"{name}-router"}}]
        user |= {"runAsUser": 10001, "runAsGroup": 10001}
    else:
        command = ["vllm-router", "--host", "0.0.0.0", "--port", str(PORT)]  # noqa: S104 - a pod's own
        command += ["--vllm-pd-disaggregation", "--policy", router_policy(replace(d, decode=None))]
        command += [word for role, own in urls.items() for url in own for word in (f"--{role}", url)]
        install = f"pip install --quiet --target /tmp/router {ROUTER} && PYTHONPATH=/tmp/router exec /tmp/router/bin/"
        container |= {"image": image, "command": ["sh", "-c", install + " ".join(command)]}
        container["env"] = [{"name": "HOME", "value": "/tmp"}]  # noqa: S108 - of the container
        container["resources"] = copy.deepcopy(ROUTER_RESOURCES)
    pod = more | {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": user,
        "containers": [container],
    }
    template = {"metadata": {"labels": dict(labels)}, "spec": pod}
    service = {"selector": dict(labels), "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]}
    deployment = {"replicas": 1, "selector": {"matchLabels": dict(labels)}, "template": template}
    return [
        *resources,
        _resource("v1", "Service", name, labels, service),
        _resource("apps/v1", "Deployment", f"{name}-router", labels, deployment),
    ]


def _shape_remarks(d: Deployment, engine: PodEngine) -> Iterator[str]:
    spanning = [
        f"{f'{role}: ' if role != 'engine' else ''}{hosts_of(side)} hosts"
        for role, side in zip(roles(d), d.sides, strict=True)
        if hosts_of(side) > 1
    ]
    if spanning:
        yield (
            f"A replica spans hosts ({', '.join(spanning)}): a LeaderWorkerSet, which must be installed in the cluster "
            "(https://lws.sigs.k8s.io, version 0.6 or later), has a group of pods for it, one on each host."
        )
    if d.decode is not None:
        both = ((side.parallel.replicas, replica_gpus(side)) for side in d.sides)
        shapes = ("Prefill replicas: {}; GPUs of each: {}.", "Decode replicas: {}; GPUs of each: {}.")
        texts = (shape.format(*numbers) for shape, numbers in zip(shapes, both, strict=True))
        yield f"{d.name}, served with {engine.title}. {' '.join(texts)}"
        yield (
            f"The Service leads to a router ({ROUTER}, installed when its pod starts). The image must have NIXL. Where "
            "GPUs reach each other by RDMA only, add its devices to the pods."
        )
        yield (
            f"The pods have llm-d's labels ({LLM_D_ROLE}, {LLM_D_SERVING}), by which its endpoint picker finds both "
            "sides; llm-d also needs its routing sidecar in the decode pods, which this file lacks."
        )
        return
    if d.groups:
        groups = "; ".join(
            f"{role}: {side.parallel.replicas} x {replica_gpus(side)} {side.gpu.name}"
            for role, side in zip(roles(d), d.sides, strict=True)
        )
        yield f"{d.name}, served with {engine.title}. Replicas x GPUs of each: {groups}."
        yield (
            f"The Service leads to lengthwise's gateway. Build its image {GATEWAY_IMAGE} by deploy/Containerfile of "
            "lengthwise's repository, push it, and name it below."
        )
        return
    yield f"{d.name}, served with {engine.title}. Replicas: {d.parallel.replicas}; GPUs of each: {replica_gpus(d)}."
    yield (
        f"The Service spreads connections over {d.parallel.replicas} pods whatever their load; "
        "for a router see `On Kubernetes` in README.md."
        if d.parallel.replicas > 1
        else "The one pod stands behind the Service."
    )


def _yaml(resources: list[dict[str, Any]]) -> str:
    import yaml

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {})

    def literal(dump: Any, value: str) -> Any:
        return dump.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    dumper.add_representer(str, literal)
    return str(yaml.dump_all(resources, Dumper=dumper, sort_keys=False, explicit_start=True, width=100))


DYNAMO_IMAGE = "nvcr.io/nvidia/ai-dynamo/{}-runtime:1.5.1"


def dynamo_manifest(
    deployment: Deployment,
    *,
    name: str,
    model: str | None = None,
    image: str | None = None,
    token_secret: str,
    engine: str = "vllm",
) -> str:
    """Return the YAML of a DynamoGraphDeployment: a frontend with a router, and workers of each side.

    The workers run ``engine``, "vllm" or "sglang". The other arguments, names and errors are those of
    ``kubernetes_manifest``. Dynamo's operator adds ports and probes, and the ranks of replicas that span hosts.
    """
    d, parts = deployment, ("worker",) if deployment.decode is None else ("prefill", "decode")
    sides = [replace(side, scheduler=replace(side.scheduler, sglang=None, trtllm=None)) for side in d.sides]
    if engine == "vllm":
        launches = [vllm_launch(side, model=model) for side in sides]
    elif d.decode is None:
        launches = [sglang_launch(d, model=model, host=_ANY_HOST)]
    else:
        launches = list(sglang_split_launches(*sides, model=model, host=_ANY_HOST))
    _check(replace(d, scheduler=sides[0].scheduler), name, launches[0])
    used, mode = image or DYNAMO_IMAGE.format(engine), _DYNAMO_MODES.get(router_policy(sides[0]), "kv")
    frontend = {"name": "main", "image": used, "env": [{"name": "DYN_ROUTER_MODE", "value": mode}]}
    components: list[dict[str, Any]] = [_component("frontend", 1, {"containers": [frontend]})]
    for role, side, launch in zip(parts, sides, launches, strict=True):
        pod = _pod(side, launch, used, token_secret, name)
        (container,) = pod["containers"]
        arguments = list(_without(launch.command[3:], ("--port", "--nnodes")))
        if engine == "vllm":
            arguments = ["--model", launch.command[2], *_without(launch.command[3:], _OF_COMMAND)]
        if engine == "vllm" and d.decode is not None:
            config = json.dumps({"kv_connector": CONNECTOR, "kv_role": "kv_both"})
            arguments += ["--disaggregation-mode", role, "--kv-transfer-config", config]
        own: dict[str, Any] = {"name": "main", "image": used, "command": ["python3", "-m", f"dynamo.{engine}"]}
        own |= {"args": arguments, "resources": container["resources"]}
        own["env"] = [one for one in container["env"] if one["name"] != "HOME"]
        if mounts := [one for one in container["volumeMounts"] if one["name"] not in ("shm", "cache")]:
            own["volumeMounts"] = mounts
        worker: dict[str, Any] = {"containers": [own]}
        if volumes := [one for one in pod["volumes"] if one["name"] not in ("shm", "cache")]:
            worker["volumes"] = volumes
        if len(d.gpus_by_name) > 1:
            worker |= _node_affinity(side)
        made = _component(role, side.parallel.replicas, worker)
        (shm,) = [one for one in pod["volumes"] if one["name"] == "shm"]
        made["sharedMemorySize"] = shm["emptyDir"]["sizeLimit"]
        if hosts_of(side) > 1:
            made["multinode"] = {"nodeCount": hosts_of(side)}
        components.append(made)
    spec = {"backendFramework": engine, "components": components}
    version = "vLLM 0.32" if engine == "vllm" else "SGLang 0.5.23"
    remarks = (
        f"{d.name} on NVIDIA Dynamo, whose operator must be installed in the cluster. Never run.",
        (
            f"The flags are those of {version}. An image of Dynamo has an engine of its own: take one with that "
            "version, and set it below and in runtimeVersionOverride if its tag is not Dynamo's version."
        ),
        _node_remark(d, is_mixed=len(d.gpus_by_name) > 1),
    )
    graph = _resource("nvidia.com/v1beta1", "DynamoGraphDeployment", name, _labels(name, "graph"), spec)
    return "\n#\n".join(comment(remark) for remark in remarks) + f"\n{_yaml([graph])}"


_ANY_HOST = "0.0.0.0"  # noqa: S104  decode replicas ask a prefill replica's bootstrap server
_DYNAMO_MODES = {
    "round_robin": "round-robin",
    "random": "random",
    "power_of_two": "power-of-two",
}  # others: by prefixes
_OF_COMMAND = ("--host", "--port", "--nnodes")  # flags that Dynamo's vLLM worker does not have


def _component(role: str, replicas: int, spec: dict[str, Any]) -> dict[str, Any]:
    return {"name": role, "type": role, "replicas": replicas, "podTemplate": {"spec": spec}}


def _without(words: tuple[str, ...], flags: tuple[str, ...]) -> list[str]:
    """Return a command's words without these flags and their values."""
    return [word for i, word in enumerate(words) if word not in flags and (i == 0 or words[i - 1] not in flags)]


def is_nvidia(deployment: Deployment) -> bool:
    """Return whether the deployment has NVIDIA GPUs, which the image and ``nvidia.com/gpu`` require."""
    return all(side.gpu.is_nvidia for side in deployment.sides)


def _product_names(d: Deployment) -> list[str]:
    return [alias for alias in d.gpu.aliases if alias.startswith("NVIDIA")] or [d.gpu.name]


def _node_affinity(d: Deployment) -> dict[str, Any]:
    """Return the part of a pod's spec that binds it to nodes with its GPUs, by the label of GPU feature discovery."""
    products = [name.replace(" ", "-") for name in _product_names(d)]
    terms = [{"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": products}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}}


def _node_remark(d: Deployment, *, is_mixed: bool) -> str:
    label = "; ".join(dict.fromkeys(", ".join(_product_names(side)) for side in d.sides))
    if is_mixed:
        return (
            f"Nodes must have {label}. Pods take those with their own GPUs by the label nvidia.com/gpu.product, which "
            "GPU feature discovery sets."
        )
    return (
        f"Nodes must have {label}; where kinds are mixed, add a nodeSelector for nvidia.com/gpu.product "
        "(GPU feature discovery) to the pod's spec."
    )


def _storage_remarks(d: Deployment, name: str) -> Iterator[str]:
    if _shares_storage(d):
        yield (
            f"Replicas share the storage at {STORAGE_FOLDER}: before you apply this file, create the "
            f"PersistentVolumeClaim {name}-kv-cache with access mode ReadWriteMany, on a file system that group 0 may "
            "write to."
        )
    elif d.storage_blocks:
        yield (
            f"The storage at {STORAGE_FOLDER} is an emptyDir on the node's disk, deleted with the pod: put the volume "
            "of another disk in its place (a volumeClaimTemplate, or a hostPath that group 0 may write to)."
        )


def _shares_storage(d: Deployment) -> bool:
    offloading = d.limits.kv_offloading
    return bool(d.storage_blocks and offloading and offloading.storage and offloading.storage.shared)


def _pod(d: Deployment, launch: Launch, image: str, token_secret: str | None, name: str) -> dict[str, Any]:
    engine, health = pod_engine(d), {"path": "/health", "port": "http"}
    wait = {"timeoutSeconds": engine.health_s} if engine.health_s > 1 else {}
    environment: list[dict[str, Any]] = [{"name": "HOME", "value": engine.home}]
    if token_secret is not None:
        token = {"secretKeyRef": {"name": token_secret, "key": "token", "optional": True}}
        environment.append({"name": "HF_TOKEN", "valueFrom": token})
    # vLLM keeps the CPU memory behind the KV cache in /dev/shm, and does not start if that is too small.
    offloading = d.limits.kv_offloading
    shm_gib = SHM_GIB + math.ceil(offloading.size_gb * GB / GIB if offloading else 0)
    shm = f"{shm_gib}Gi"
    behind_gib = shm_gib - SHM_GIB  # what is in /dev/shm counts as the pod's memory
    gpus, ranks = replica_gpus(d) // hosts_of(d), -(-d.parallel.dp // hosts_of(d))
    processes = 2 * ranks + gpus + (d.parallel.dp > 1)
    resources: dict[str, Any] = {
        "requests": {"cpu": str(CPUS_PER_PROCESS * processes), "memory": f"{REQUEST_GIB * gpus + behind_gib}Gi"},
        "limits": {"memory": f"{LIMIT_GIB * gpus + behind_gib}Gi", "nvidia.com/gpu": gpus},
    }
    mounts = [
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - where NCCL and PyTorch share memory
        {"name": "cache", "mountPath": f"{engine.home}/.cache"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
        {"name": "cache", "emptyDir": {}},
    ]
    if d.storage_blocks:
        shared = {"persistentVolumeClaim": {"claimName": f"{name}-kv-cache"}}
        mounts.append({"name": "kv-cache", "mountPath": STORAGE_FOLDER})
        volumes.append({"name": "kv-cache", **(shared if _shares_storage(d) else {"emptyDir": {}})})
    if OPTIONS in launch.command:
        mounts.append({"name": "options", "mountPath": OPTIONS_FOLDER})
        volumes.append({"name": "options", "configMap": {"name": name}})
    arguments = [f"{OPTIONS_FOLDER}/{word}" if word == OPTIONS else word for word in launch.command[engine.words :]]
    user = {"runAsNonRoot": True, "runAsUser": engine.user, "runAsGroup": 0} if engine.user else {}
    container = {
        "name": d.scheduler.engine_rules or "vllm",
        "image": image,
        "command": list(launch.command[: engine.words]),
        "args": [*arguments, *engine.drain],
        "env": environment,
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": resources,
        "startupProbe": {"httpGet": dict(health), "periodSeconds": 10, "failureThreshold": LOAD_S // 10} | wait,
        "readinessProbe": {"httpGet": dict(health), "periodSeconds": 5, "failureThreshold": 2} | wait,
        "livenessProbe": {"httpGet": health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6} | wait,
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # no variables named after Services, such as VLLM_PORT
        # The container leaves the endpoints, then drains, then has a little time to exit.
        "terminationGracePeriodSeconds": LEAVE_S + DRAIN_S + 30,
        "securityContext": {**user, "fsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }
