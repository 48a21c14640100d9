"""The manifests agree with each other, with the gateway, and with the manifests that a plan writes."""

from __future__ import annotations

import copy
import io
import math
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rendered_manifests import (
    ALL,
    ENGINE,
    GATEWAY,
    WITH_VLLM,
    container,
    engine,
    gateway,
    gateway_toml,
    of_kind,
    resources,
    sleeps_s,
    the,
)

from lengthwise import EngineLimits, deploy
from lengthwise.backend import kubernetes as plan
from lengthwise.cli import main
from lengthwise.config import loads_gateway
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.edge.app import route
from lengthwise.gateway.edge.auth import Caller
from lengthwise.gateway.edge.client_request import RequestParser

CLIENTS = "/etc/lengthwise/keys/clients"
MIN_FREE_BYTES = 512 << 20


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """The configuration of the gateway of an overlay: its own command line, checked by the real command."""
    folder = tmp_path_factory.mktemp("gateways")
    return cache(lambda name: _report(name, folder / name))


def _report(name: str, folder: Path) -> GatewayConfig:
    folder.mkdir()
    keys, file = folder / "clients", folder / "gateway.toml"
    keys.write_text(f"team:{'0' * 64}\n")
    file.write_text(gateway_toml(name).replace(CLIENTS, str(keys)))
    path, *options = container(gateway(name))["args"]
    assert path == "/etc/lengthwise/gateway.toml"
    options = [option.replace("$(POD_NAMESPACE)", namespace(name)) for option in options]
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("ENGINE_API_KEY", "any")
        assert main(["serve", str(file), *options, "--check"]) == 0
        return loads_gateway(out.getvalue()).config


def namespace(name: str) -> str:
    return the(name, "Deployment", "gateway")["metadata"]["namespace"]


def pods(name: str) -> list[dict]:
    return [r["spec"]["template"] for r in resources(name) if r["kind"] in ("Deployment", "StatefulSet")]


def labels(name: str) -> list[dict]:
    return [pod["metadata"]["labels"] for pod in pods(name)]


def ports(one: dict) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(one)["ports"]}


def matches(selector: dict, of: dict) -> bool:
    return selector.items() <= of.items()


@pytest.mark.parametrize("name", ALL)
def test_ports_agree(name, config_of):
    config = config_of(name)
    assert ports(gateway(name)) == {"http": config.listen.port, "admin": config.listen.admin_port}
    assert ports(engine(name)) == {"http": plan.PORT}
    assert config.discovery.endpoint_slices == f"{namespace(name)}/engine-pods:{plan.PORT}"
    (port,) = the(name, "Service", "engine-pods")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (plan.PORT, "http")
    (port,) = the(name, "Service", "gateway")["spec"]["ports"]
    assert port["targetPort"] == "http"  # the admin port is not among the clients'


@pytest.mark.parametrize("name", ALL)
def test_access_requires_a_key(name, config_of):
    """Keys everywhere but on a laptop, and the engines' own key goes with them."""
    config = config_of(name)
    assert bool(config.keys) == (name != "dev")
    assert (config.discovery.engine.api_key is not None) == (name != "dev")
    env = {one["name"]: one for one in container(engine(name))["env"]}
    assert ("VLLM_API_KEY" in env) == (name != "dev")
    if name == "dev":
        return
    mounted = {mount["name"]: mount for mount in container(gateway(name))["volumeMounts"]}
    assert CLIENTS.startswith(mounted["keys"]["mountPath"] + "/")
    (secret,) = [volume["secret"] for volume in gateway(name)["volumes"] if "secret" in volume]
    assert [item["path"] for item in secret["items"]] == [CLIENTS.rpartition("/")[2]]


@pytest.mark.parametrize("name", ALL)
def test_probes_use_routes_that_are_open_to_all(name):
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        requested = container(gateway(name))[kind]["httpGet"]
        found = route({"path": requested["path"], "method": "GET"})
        assert found.is_open
        assert requested["port"] == "http"


@pytest.mark.parametrize("name", ALL)
def test_a_gateway_stays_in_its_service_as_long_as_requests_wait_for_an_engine(name, config_of):
    probe = container(gateway(name))["readinessProbe"]
    within_s = probe["periodSeconds"] * probe["failureThreshold"]
    if probe["httpGet"]["path"] == "/ready":
        assert within_s >= config_of(name).admission.no_engine_s
    assert (probe["httpGet"]["path"] == "/health") == (name == "scale-to-zero")


@pytest.mark.parametrize("name", ALL)
def test_pods_drain_before_they_are_killed(name, config_of):
    one = gateway(name)
    resilience = config_of(name).resilience
    assert resilience.linger_s >= 5.0  # a cluster's proxies follow within seconds
    assert "lifecycle" not in container(one)  # the gateway itself serves on
    assert resilience.linger_s + resilience.drain_s < one["terminationGracePeriodSeconds"]
    if name == "dev":
        return
    one = engine(name)
    arguments = container(one)["args"]
    shutdown_s = int(arguments[arguments.index("--shutdown-timeout") + 1])
    assert sleeps_s(container(one)) + shutdown_s < one["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", WITH_VLLM)
def test_an_engine_is_what_a_plan_writes_for_it(name, config_of):
    """But for prefix caching, defaults that may change a cut answer, and a key; production keeps its cache."""
    d = deploy("llama-3.1-8b", "H100", replicas=2, limits=EngineLimits(max_model_len=8192))
    text = plan.kubernetes_manifest(d, name="engine", token_secret="hugging-face")
    (planned,) = [r for r in yaml.safe_load_all(text) if r["kind"] == "StatefulSet"]
    own = copy.deepcopy(the(name, "StatefulSet", "engine"))
    one, other = container(engine_of(own)), container(engine_of(planned))
    other["args"].remove("--no-enable-prefix-caching")
    at = one["args"].index("--generation-config")
    assert one["args"][at : at + 2] == ["--generation-config", "vllm"]
    assert config_of(name).discovery.engine.generation_defaults == "none"
    del one["args"][at : at + 2]
    one["env"] = [entry for entry in one["env"] if entry["name"] != "VLLM_API_KEY"]
    assert one == other
    for template in (engine_of(own), engine_of(planned)):
        template["volumes"] = [volume for volume in template["volumes"] if volume["name"] != "cache"]
    assert engine_of(own) == engine_of(planned)
    for key in ("serviceName", "podManagementPolicy", "selector"):
        assert own["spec"][key] == planned["spec"][key]


def engine_of(stateful: dict) -> dict:
    return stateful["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ALL)
def test_pods_are_locked_down(name):
    """As the namespace's restricted level demands; the gateway's root file system is read-only too."""
    for template in pods(name):
        reported = template["spec"]["securityContext"]
        assert reported["runAsNonRoot"] is True
        assert reported["runAsUser"] > 0
        assert reported["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in template["spec"]["containers"] + template["spec"].get("initContainers", []):
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert one["resources"]["limits"]
    for one in gateway(name)["containers"] + gateway(name)["initContainers"]:
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
    level = the(name, "Namespace", "lengthwise")["metadata"]["labels"]
    assert level["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("name", ALL)
def test_what_a_gateway_writes_to_can_be_written_to(name):
    one = gateway(name)
    writable = {volume["name"] for volume in one["volumes"] if "emptyDir" in volume}
    mounts = {mount["mountPath"] for mount in container(one)["volumeMounts"] if mount["name"] in writable}
    env = {entry["name"]: entry.get("value") for entry in container(one)["env"]}
    assert {"/tmp", env["LENGTHWISE_CACHE_DIR"]} <= mounts
    (before,) = one["initContainers"]
    assert before["command"][-1] == env["LENGTHWISE_CACHE_DIR"]


@pytest.mark.parametrize("name", ALL)
def test_memory_holds_the_queue(name, config_of):
    limit = container(gateway(name))["resources"]["limits"]["memory"]
    assert limit.endswith("Mi")
    in_use = int(limit[:-2]) << 20
    config = config_of(name)
    assert in_use >= config.limits.body_budget_bytes + MIN_FREE_BYTES
    prompt = b"Tell me a joke about it, " * 40_000
    body = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % prompt
    factor = RequestParser(config.limits).parse("chat", body, Caller(None, 0), {}, "r", 0.0).memory_bytes / len(body)
    assert config.admission.max_queued_bytes * factor <= config.limits.body_budget_bytes, "429 of the queue is met"


@pytest.mark.parametrize("name", ALL)
def test_selectors_find_their_pods(name):
    for one in of_kind(name, "Service"):
        assert any(matches(one["spec"]["selector"], of) for of in labels(name)), one["metadata"]["name"]
    for kind in ("PodDisruptionBudget", "Deployment", "StatefulSet"):
        for one in of_kind(name, kind):
            assert any(matches(one["spec"]["selector"]["matchLabels"], of) for of in labels(name))
    for policy in of_kind(name, "NetworkPolicy"):
        assert any(matches(policy["spec"]["podSelector"]["matchLabels"], of) for of in labels(name))
    assert {tuple(one["spec"]["selector"]["matchLabels"].items()) for one in of_kind(name, "PodDisruptionBudget")} == {
        tuple(sorted(GATEWAY.items())), tuple(sorted(ENGINE.items())),
    }  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_a_gateway_may_watch_endpoint_slices_and_nothing_else(name):
    (role,), (binding,) = of_kind(name, "Role"), of_kind(name, "RoleBinding")
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == gateway(name)["serviceAccountName"]
    assert gateway(name)["automountServiceAccountToken"] is True
    assert engine(name)["automountServiceAccountToken"] is False
    assert not of_kind(name, "ClusterRole")
    assert not of_kind(name, "ClusterRoleBinding")


@pytest.mark.parametrize("name", ALL)
def test_only_the_gateway_reaches_engines_and_only_prometheus_its_admin_port(name):
    policies = {
        tuple(p["spec"]["podSelector"]["matchLabels"].items()): p["spec"] for p in of_kind(name, "NetworkPolicy")
    }
    to_engine = policies[tuple(sorted(ENGINE.items()))]
    to_gateway = policies[tuple(sorted(GATEWAY.items()))]
    assert all(set(spec["policyTypes"]) == {"Ingress", "Egress"} for spec in policies.values())
    (rule,) = to_engine["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": GATEWAY}}], "ports": [{"port": plan.PORT}]}
    admin = [rule for rule in to_gateway["ingress"] if {"port": 8001} in rule["ports"]]
    assert [rule["from"] for rule in admin] == [
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    ]
    assert all(rule["from"] for rule in to_gateway["ingress"])  # an empty one is everybody
    assert {"to": [{"podSelector": {"matchLabels": ENGINE}}], "ports": [{"port": plan.PORT}]} in to_gateway["egress"]
    services = [s["metadata"]["name"] for s in of_kind(name, "Service") if s["spec"]["selector"] == ENGINE]
    assert services == ["engine-pods"]  # headless: what the gateway finds, and no way around it


@pytest.mark.parametrize("name", ALL)
def test_a_gateway_reaches_engines_names_and_the_api_it_watches_and_nothing_else(name, config_of):
    (policy,) = [
        one["spec"]
        for one in of_kind(name, "NetworkPolicy")
        if matches(one["spec"]["podSelector"]["matchLabels"], GATEWAY)
    ]
    engines, names, *others = policy["egress"]
    assert engines == {"to": [{"podSelector": {"matchLabels": ENGINE}}], "ports": [{"port": plan.PORT}]}
    assert {(port["protocol"], port["port"]) for port in names["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert names["to"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}]
    watches = config_of(name).discovery.endpoint_slices is not None
    assert watches == gateway(name)["automountServiceAccountToken"]
    assert others == ([{"ports": [{"port": 443}, {"port": 6443}]}] if watches else [])


@pytest.mark.parametrize("name", ["keda", "scale-to-zero"])
def test_engines_are_scaled_by_seconds_of_backlog(name):
    scaled = the(name, "ScaledObject", "engine")["spec"]
    target = the(name, scaled["scaleTargetRef"]["kind"], scaled["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"]  # else every apply would undo the scaling
    backlog = scaled["triggers"][0]
    assert backlog["metricType"] == "Value"  # a ratio to what is there already
    assert f'namespace="{namespace(name)}"' in backlog["metadata"]["query"]
    assert scaled["minReplicaCount"] == (0 if name == "scale-to-zero" else 2)
    if name == "scale-to-zero":
        (wakes,) = [trigger for trigger in scaled["triggers"] if "activationThreshold" in trigger["metadata"]]
        assert "lengthwise_queue_requests" in wakes["metadata"]["query"]
        assert math.ceil(10_000 / float(wakes["metadata"]["threshold"])) == 1  # it asks for one and no more


def test_hpa_and_keda_scale_alike():
    """Both by Value: the metric is a ratio to the engines that are there, which AverageValue would divide once more."""
    hpa, keda = the("hpa", "HorizontalPodAutoscaler", "engine")["spec"], the("keda", "ScaledObject", "engine")["spec"]
    (metric,), (trigger,) = hpa["metrics"], keda["triggers"]
    assert metric["external"]["target"] == {"type": trigger["metricType"], "value": trigger["metadata"]["threshold"]}
    assert trigger["metadata"]["query"].startswith(f"sum({metric['external']['metric']['name']}{{")
    limits = {"minReplicas": keda["minReplicaCount"], "maxReplicas": keda["maxReplicaCount"]}
    assert limits == {name: hpa[name] for name in limits}
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert hpa["scaleTargetRef"] == keda["scaleTargetRef"]
    assert "replicas" not in the("hpa", "StatefulSet", "engine")["spec"]


@given(st.integers(1, 64), st.lists(st.floats(1e3, 1e6), min_size=1, max_size=4), st.floats(50.0, 5e3))
def test_the_autoscalers_ask_for_the_fewest_engines_that_meet_the_threshold(ready, backlogs_tokens, tokens_per_s):
    """Kubernetes' rule for Value, on the sum over gateways that the query makes."""
    threshold_s = float(the("keda", "ScaledObject", "engine")["spec"]["triggers"][0]["metadata"]["threshold"])
    value_s = sum(tokens / (ready * tokens_per_s) for tokens in backlogs_tokens)  # lengthwise_backlog_seconds of each
    desired = math.ceil(ready * value_s / threshold_s * (1 - 1e-12))
    left_s = [sum(backlogs_tokens) / (engines * tokens_per_s) for engines in (desired, max(1, desired - 1))]
    assert left_s[0] <= threshold_s * (1 + 1e-9)
    assert desired == 1 or left_s[1] > threshold_s


def test_requests_wait_for_the_first_engine_with_scale_to_zero(config_of):
    load_s = 600
    assert config_of("scale-to-zero").admission.no_engine_s >= load_s
    assert config_of("base").order == config_of("scale-to-zero").order


def test_no_node_holds_all_gateways_of_production():
    assert the("production", "Deployment", "gateway")["spec"]["replicas"] >= 2
    (term,) = gateway("production")["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert matches(term["labelSelector"]["matchLabels"], GATEWAY)
    update = the("production", "Deployment", "gateway")["spec"]["strategy"]["rollingUpdate"]
    assert update["maxUnavailable"] == 0


def test_a_laptop_needs_no_gpu():
    one = container(engine("dev"))
    assert "nvidia" not in str(one)
    assert one["image"].partition(":")[0] == container(gateway("dev"))["image"].partition(":")[0]
    assert one["command"] == ["python", "-m", "lengthwise.testing.engine_server"]
