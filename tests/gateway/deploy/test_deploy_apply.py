"""An API server takes the manifests by server-side apply: kubectl and Helm are real, the server is emulated."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kube_api import KubeApi, kind_named
from kube_apply import ConflictError, Manager, apply, changed, fields, merged, update
from rendered_manifests import ALL, DEPLOY, folder, kustomized, output_of, tool, without_digests

from lengthwise import EngineLimits, deploy
from lengthwise.backend.kubernetes import kubernetes_manifest
from lengthwise.gateway.background import on_thread


@contextmanager
def kube() -> Iterator[KubeApi]:
    """An API server in a thread."""
    with on_thread(KubeApi(), "kube-api") as api:
        yield api


def kubectl(api: KubeApi, *words: str) -> str:
    return output_of(tool("kubectl"), "--server", api.url, *words)


def applied(api: KubeApi, *words: str) -> list[str]:
    """Apply manifests; return the version of every object."""
    kubectl(api, "apply", "--server-side", *words)
    return versions(api)


def versions(api: KubeApi) -> list[str]:
    return [item["metadata"]["resourceVersion"] for item in api.objects()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALL, "llm-d"])
def test_an_api_server_takes_every_manifest_and_a_second_apply_changes_nothing(name):
    place = DEPLOY / "llm-d" if name == "llm-d" else folder(name)
    with kube() as api:
        if name == "llm-d":
            kubectl(api, "create", "namespace", "llm-d")
        first = applied(api, "-k", str(place))
        assert applied(api, "-k", str(place)) == first
        taken = {(item["kind"], item["metadata"]["name"]) for item in api.objects()}
        rendered = list(yaml.safe_load_all(kubectl(api, "kustomize", str(place))))
        assert {(one["kind"], one["metadata"]["name"]) for one in rendered} <= taken
        owners = {row["manager"] for item in api.objects() for row in item["metadata"]["managedFields"]}
        assert owners <= {"kubectl", "kubectl-create"}


@pytest.mark.slow
def test_an_api_server_takes_what_a_plan_writes(tmp_path):
    plan = deploy("llama-3.1-8b", "H100", replicas=2, limits=EngineLimits(max_model_len=8192))
    (tmp_path / "plan.yaml").write_text(kubernetes_manifest(plan, name="chat", token_secret="hugging-face"))
    with kube() as api:
        kubectl(api, "create", "namespace", "plans")
        first = applied(api, "--namespace", "plans", "-f", str(tmp_path / "plan.yaml"))
        assert applied(api, "--namespace", "plans", "-f", str(tmp_path / "plan.yaml")) == first
        assert api.get("StatefulSet", "chat", "plans")["spec"]["replicas"] == 2


@pytest.mark.slow
def test_wrong_manifests_are_refused_with_the_field_at_fault(tmp_path):
    """What the tests above are worth."""
    good = {(one["kind"], one["metadata"]["name"]): one for one in kustomized("keda")}
    wrongs = {
        "readynessProbe": ("StatefulSet", ["template", "spec", "containers", 0, "readynessProbe"], {}),
        "treshold": ("ScaledObject", ["triggers", 0, "metadata", "treshold"], "1"),
        "does not match template": ("StatefulSet", ["selector", "matchLabels", "app.kubernetes.io/name"], "x"),
        "less than or equal to its limit": (
            "StatefulSet", ["template", "spec", "containers", 0, "resources", "requests", "memory"], "1Ti"),
        "Not found: 'nowhere'": (
            "StatefulSet", ["template", "spec", "containers", 0, "volumeMounts", 0, "name"], "nowhere"),
    }  # fmt: skip
    with kube() as api:
        kubectl(api, "create", "namespace", "lengthwise")
        for message, (kind, path, value) in wrongs.items():
            item = copy.deepcopy(good[kind, "engine"])
            *way, last = ["spec", *path]
            at = item
            for step in way:
                at = at[step]
            at[last] = value
            (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(item))
            command = [
                tool("kubectl"),
                "--server",
                api.url,
                "apply",
                "--server-side",
                "-f",
                str(tmp_path / "wrong.yaml"),
            ]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
            assert done.returncode == 1
            assert message in done.stderr
        assert api.items("StatefulSet") == api.items("ScaledObject") == []


@pytest.mark.slow
def test_an_autoscaler_and_an_apply_do_not_undo_each_other():
    """Only the overlays with an autoscaler leave the number of engines to it."""
    with kube() as api:
        applied(api, "-k", str(folder("keda")))
        kubectl(api, "--namespace", "lengthwise", "scale", "statefulset/engine", "--replicas=7")
        applied(api, "-k", str(folder("keda")))
        assert api.get("StatefulSet", "engine", "lengthwise")["spec"]["replicas"] == 7
    with kube() as api:
        applied(api, "-k", str(folder("production")))
        kubectl(api, "--namespace", "lengthwise", "scale", "statefulset/engine", "--replicas=7")
        command = [tool("kubectl"), "--server", api.url, "apply", "--server-side", "-k", str(folder("production"))]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert 'conflict: conflicts with "kubectl": .spec.replicas' in done.stderr
        applied(api, "--force-conflicts", "-k", str(folder("production")))
        assert api.get("StatefulSet", "engine", "lengthwise")["spec"]["replicas"] == 4


# Helm
CHART = str(DEPLOY / "helm")
VALUES = {
    "base": ("--set", "image=lengthwise-gateway"),
    "production": ("-f", f"{CHART}/production.yaml"),
    "monitoring": ("-f", f"{CHART}/production.yaml", "--set", "monitoring=true"),
    "hpa": ("-f", f"{CHART}/production.yaml", "--set", "hpa=true"),
    "keda": ("-f", f"{CHART}/production.yaml", "--set", "keda.enabled=true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_the_chart_has_the_objects_of_the_overlay(name):
    text = output_of(tool("helm"), "template", "any", CHART, "--namespace", "lengthwise", *VALUES[name])
    rendered, expected = (
        {(one["kind"], one["metadata"]["name"]): one for one in found}
        for found in (without_digests(text), kustomized(name))
    )
    del expected["Namespace", "lengthwise"]  # helm --create-namespace
    assert rendered == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("gatway.replicas=2", "'gatway' not allowed"),
        ("engine.replicas=two", "got string, want integer"),
        ("hpa=true,keda.enabled=true", "one autoscaler can scale the engines"),
    ],
)
def test_wrong_values_of_the_chart_are_refused(values, message):
    command = [tool("helm"), "template", "any", CHART, "--set", values]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.slow
def test_helm_installs_upgrades_and_removes_the_chart(tmp_path):
    environment = dict(os.environ) | {"HOME": str(tmp_path)}
    with kube() as api:

        def helm(command: str, *words: str) -> None:
            called = [tool("helm"), "--kube-apiserver", api.url, "--namespace", "serving", command, "chat", *words]
            done = subprocess.run(called, check=False, capture_output=True, text=True, timeout=60, env=environment)
            assert done.returncode == 0, done.stderr

        helm("install", CHART, "--create-namespace", *VALUES["keda"])
        before = api.get("Deployment", "gateway", "serving")
        (trigger,) = api.get("ScaledObject", "engine", "serving")["spec"]["triggers"]
        assert trigger["metadata"]["query"] == 'sum(lengthwise_backlog_seconds{namespace="serving"})'
        kubectl(api, "--namespace", "serving", "scale", "statefulset/engine", "--replicas=7")
        (tmp_path / "gateway.toml").write_text('[order]\nmode = "observe"\n')
        helm("upgrade", CHART, *VALUES["keda"], "--set-file", f"gateway.config={tmp_path / 'gateway.toml'}")
        after = api.get("Deployment", "gateway", "serving")
        assert before["spec"]["template"] != after["spec"]["template"]  # another ConfigMap, so that the pods roll
        assert api.get("StatefulSet", "engine", "serving")["spec"]["replicas"] == 7
        helm("uninstall")
        assert {item["kind"] for item in api.objects()} == {"Namespace"}


# Laws of server-side apply, in the emulated server
KIND = kind_named("Deployment")
NAMES = st.sampled_from("abc")
COMMANDS = st.lists(NAMES, min_size=1, max_size=2)
CONTAINERS = st.dictionaries(
    NAMES, st.fixed_dictionaries({}, optional={"image": NAMES, "command": COMMANDS}), min_size=1
)


@st.composite
def specs(draw):
    spec = draw(st.fixed_dictionaries({}, optional={"replicas": st.integers(0, 3), "paused": st.booleans()}))
    found = {"name": "x", "labels": draw(st.dictionaries(NAMES, NAMES, min_size=1, max_size=3))}
    containers = [{"name": name} | rest for name, rest in draw(CONTAINERS).items()]
    template = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": containers}}
    return {"metadata": found, "spec": spec | {"template": template}}


ONE, TWO = (Manager(name, "Apply", "apps/v1") for name in ("one", "two"))


def by(live, managed, manager, item, *, force=False):
    return apply(live, item, managed, manager, KIND.schema, force=force)


@given(specs(), specs())
def test_what_a_manager_applies_replaces_what_it_applied_before(first, second):
    live, managed = by(*by(None, {}, ONE, first), ONE, second)
    assert fields(live, KIND.schema) == fields(second, KIND.schema) == managed[ONE]
    assert changed(live, second, KIND.schema) == (frozenset(), frozenset())
    assert by(live, managed, ONE, second) == (live, managed)


@given(specs(), specs())
def test_an_apply_conflicts_exactly_with_fields_of_others_that_it_changes(own, other):
    live, managed = by(None, {}, TWO, other)
    different, _ = changed(live, merged(live, own, KIND.schema), KIND.schema)
    expected = different & fields(other, KIND.schema)
    if expected:
        with pytest.raises(ConflictError) as found:
            by(live, managed, ONE, own)
        assert {path for _, path in found.value.conflicts} == expected
    new, owners = by(live, managed, ONE, own, force=bool(expected))
    assert not owners.get(TWO, frozenset()) & expected
    assert owners[ONE] == fields(own, KIND.schema) <= fields(new, KIND.schema)
    assert owners.get(TWO, frozenset()) <= fields(new, KIND.schema)


@given(specs(), st.integers(4, 9))
def test_a_field_of_nobody_else_goes_with_its_owner_and_one_that_another_changed_stays(item, replicas):
    item["spec"]["replicas"] = 1
    live, managed = by(None, {}, ONE, item)
    scaled = copy.deepcopy(live)
    scaled["spec"]["replicas"] = replicas
    managed = update(live, scaled, managed, Manager("scaler", "Update", "apps/v1", "scale"), KIND.schema)
    rest = copy.deepcopy(item)
    del rest["spec"]["replicas"]
    assert by(scaled, managed, ONE, rest)[0]["spec"]["replicas"] == replicas
    live, managed = by(None, {}, ONE, item)
    assert "replicas" not in by(live, managed, ONE, rest)[0]["spec"]


@given(st.permutations([0, 1, 2]))
def test_managers_of_different_items_of_a_list_do_not_meet(order):
    names = "abc"
    item, managed = None, {}
    for number in order:
        own = {"spec": {"template": {"spec": {"containers": [{"name": names[number], "image": "i"}]}}}}
        item, managed = by(item, managed, Manager(str(number), "Apply", "apps/v1"), own)
    found = [one["name"] for one in item["spec"]["template"]["spec"]["containers"]]
    assert sorted(found) == list(names)
    assert not any(a & b - {()} for a, b in itertools.combinations(managed.values(), 2))
