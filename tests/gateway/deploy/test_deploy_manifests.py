"""Kubernetes would take every manifest: core kinds by its own schemas, custom ones by their definitions."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import typer
from own_kustomize import built
from rendered_manifests import ALL, DEPLOY, kustomized, resources, the

from lengthwise.cli.program import app

SCHEMAS = Path(__file__).parent / "schemas"
CUSTOM = {"ScaledObject", "ServiceMonitor", "PrometheusRule", "InferenceObjective"}


def check(resource: dict, version: str) -> None:
    if resource["kind"] in CUSTOM:
        jsonschema.validate(resource, json.loads((SCHEMAS / f"{resource['kind'].lower()}.json").read_text()))
    else:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_the_oldest_api_would_take_every_resource(name):
    """The newest takes them in test_deploy_apply.py."""
    for resource in resources(name):
        check(resource, "1.30")


def test_a_misspelt_field_would_be_seen():
    """What the validation above is worth."""
    wrong = copy.deepcopy(the("keda", "ScaledObject", "engine"))
    wrong["spec"]["minReplicas"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplicas"):
        check(wrong, "1.37")
    wrong = copy.deepcopy(the("keda", "ScaledObject", "engine"))
    wrong["spec"]["triggers"][0]["metadata"]["treshold"] = "1"
    with pytest.raises(jsonschema.ValidationError, match="treshold"):
        check(wrong, "1.37")
    wrong = copy.deepcopy(the("monitoring", "ServiceMonitor", "gateway"))
    wrong["spec"]["endpoints"][0]["intervall"] = "15s"
    with pytest.raises(jsonschema.ValidationError, match="intervall"):
        check(wrong, "1.37")
    wrong = copy.deepcopy(the("monitoring", "PrometheusRule", "gateway"))
    wrong["spec"]["groups"][0]["rules"][0]["for"] = "2 minutes"
    with pytest.raises(jsonschema.ValidationError, match="2 minutes"):
        check(wrong, "1.37")


@pytest.mark.parametrize("name", ALL)
def test_kubectl_renders_the_resources_that_are_tested(name):
    def by_name(report: list[dict]) -> dict:
        return {(one["kind"], one["metadata"]["name"]): one for one in report}

    assert by_name(kustomized(name)) == by_name(resources(name))


@pytest.mark.parametrize("name", ALL)
def test_names_are_unique_and_in_one_namespace(name):
    reported = [(r["kind"], r["metadata"]["name"]) for r in resources(name)]
    assert len(set(reported)) == len(reported)
    spaces = {r["metadata"].get("namespace") for r in resources(name) if r["kind"] != "Namespace"}
    assert spaces == {the(name, "Namespace", "lengthwise")["metadata"]["name"]}


@pytest.mark.parametrize("name", ALL)
def test_no_secret_stands_in_a_manifest(name):
    """They are named, by Secrets that the user makes; only dev has none."""
    assert "Secret" not in {r["kind"] for r in resources(name)}
    assert ("lengthwise-keys" in json.dumps(resources(name))) == (name != "dev")


@pytest.mark.parametrize("name", ALL)
def test_one_autoscaler_at_most_scales(name):
    kinds = {r["kind"] for r in resources(name)}
    assert ("HorizontalPodAutoscaler" in kinds) == (name == "hpa")
    assert ("ScaledObject" in kinds) == (name in ("keda", "scale-to-zero"))


@pytest.mark.slow
def test_the_oldest_api_would_take_the_length_server_and_llm_d_its_objectives():
    for resource in built(DEPLOY / "llm-d"):
        check(resource, "1.30")


def app_command(*names):
    """A command of the program."""
    found = typer.main.get_command(app)
    for name in names:
        found = found.get_command(None, name)
    return found


def test_the_length_server_starts_where_its_probes_and_its_service_expect_it():
    by_kind = {resource["kind"]: resource for resource in built(DEPLOY / "llm-d")}
    (container,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    command = app_command(*container["command"][1:])
    options = command.make_context("serve", list(container["args"])).params
    (port,), (served,) = container["ports"], by_kind["Service"]["spec"]["ports"]
    assert (options["host"], options["port"]) == ("0.0.0.0", port["containerPort"])
    assert (served["targetPort"], served["port"]) == (port["name"], port["containerPort"])
    assert {probe["httpGet"]["port"] for name, probe in container.items() if name.endswith("Probe")} == {port["name"]}
