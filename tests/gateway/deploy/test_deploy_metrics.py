"""Dashboard, alerts and scaling ask for metrics that a gateway tells, by labels that it gives them."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
from rendered_manifests import DEPLOY, GATEWAY, of_kind, the

from lengthwise.gateway.config import Engine, GatewayConfig
from lengthwise.gateway.request import Refusal
from lengthwise.gateway.scheduling import Signals, Statistics, WorkerStatistics
from lengthwise.gateway.telemetry import Telemetry

pytest.importorskip("prometheus_client")
SCRAPED = {"namespace", "pod", "job", "le"}
"""Labels that Prometheus adds, and the buckets'."""
_QUERY = re.compile(r"(?<![\w:])((?:lengthwise|process)_\w+)(?:\{([^}]*)\})?")


def traced_requests():
    """The telemetry's tests know how a request goes by."""
    path = Path(__file__).parents[1] / "telemetry" / "traced_requests.py"
    spec = importlib.util.spec_from_file_location("traced_requests_of_telemetry", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report() -> dict[str, set[str]]:
    """{name of a series: its labels} of a gateway that has served a request and refused one."""
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    worker = WorkerStatistics("a:1", True, 4, 8, 77.0, 600.0, Signals(4, 0, 0.25, 1))
    now = Statistics(3, 4096, 5, 1.5, 900.0, 4.5, 0.7, True, 1, (worker,))
    telemetry = Telemetry(GatewayConfig(engines=(Engine("http://e:1"),)), statistics=lambda: now)
    world = traced_requests()
    world.serve(telemetry, world.request(1, 1.0, predicted=20.0), 1.5, 10, 0.02)
    telemetry.refused("queue_full", Refusal(429, "queue_full", "full"), 0, "m")
    telemetry.metrics.gain = lambda: {"orders": [{"name": "isrtf", "mean": {"value": 0.1, "low": 0.0, "high": 0.2}}]}
    text = generate_latest(telemetry.metrics.registry()).decode()
    return {
        sample.name: set(sample.labels) for family in text_string_to_metric_families(text) for sample in family.samples
    }


def dashboard() -> dict:
    return json.loads((DEPLOY / "components/monitoring/dashboard.json").read_text())


def queries() -> list[str]:
    """All that is asked of Prometheus."""
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    variables = [one["definition"] for one in dashboard()["templating"]["list"] if "definition" in one]
    rules = [
        rule["expr"]
        for overlay in ("monitoring", "scale-to-zero")
        for group in the(overlay, "PrometheusRule", "gateway")["spec"]["groups"]
        for rule in group["rules"]
    ]
    triggers = [
        trigger["metadata"]["query"] for trigger in the("scale-to-zero", "ScaledObject", "engine")["spec"]["triggers"]
    ]
    external = [one["external"] for one in the("hpa", "HorizontalPodAutoscaler", "engine")["spec"]["metrics"]]
    return [*panels, *variables, *rules, *triggers, *(one["metric"]["name"] for one in external)]


def test_every_requested_metric_is_reported(report):
    requested = {name for query in queries() for name, _ in _QUERY.findall(query)}
    assert len(requested) >= 25
    assert requested - set(report) == set()


def test_every_requested_label_exists(report):
    checked = 0
    for query in queries():
        names = {name for name, _ in _QUERY.findall(query)}
        known = SCRAPED.union(*(report[name] for name in names))
        for name, selector in _QUERY.findall(query):
            wanted = set(re.findall(r"(\w+)\s*(?:=~|!=|=|!~)", selector))
            assert wanted <= report[name] | SCRAPED, query
            checked += len(wanted)
        for by in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query):
            assert {label.strip() for label in by.split(",")} <= known, query
            checked += 1
    assert checked > 50


def test_queries_are_closed():
    for query in queries():
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), query


def test_what_a_misspelt_metric_would_be(report):
    """What the tests above are worth."""
    assert "lengthwise_backlog_second" not in report
    assert _QUERY.findall('sum(rate(lengthwise_x_total{a="b"}[5m]))') == [("lengthwise_x_total", 'a="b"')]


def test_the_alert_on_waiting_comes_before_the_bound():
    settings = tomllib.loads((DEPLOY / "base/gateway.toml").read_text())
    rules = the("monitoring", "PrometheusRule", "gateway")["spec"]["groups"][0]["rules"]
    (near,) = [rule["expr"] for rule in rules if rule["alert"] == "LengthwiseStarvationBoundNear"]
    assert float(near.rpartition(">")[2]) == pytest.approx(0.8 * settings["order"]["max_wait_s"])


def test_prometheus_finds_the_admin_port():
    (monitor,) = of_kind("monitoring", "ServiceMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"]
    (service,) = [
        one for one in of_kind("monitoring", "Service") if selector.items() <= one["metadata"]["labels"].items()
    ]
    (endpoint,), (port,) = monitor["spec"]["endpoints"], service["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    assert service["spec"]["selector"] == GATEWAY
    ports = the("monitoring", "Deployment", "gateway")["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert {"name": port["targetPort"], "containerPort": port["port"]} in ports
    jobs = set(re.findall(r'job="([^"]*)"', " ".join(queries())))
    assert jobs == {service["metadata"]["name"]}  # what the operator calls the job
    assert endpoint["path"] == "/metrics"


def test_the_dashboard_can_be_shown():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    used = {target["datasource"]["uid"] for panel in panels for target in panel.get("targets", [])}
    assert used == {"${datasource}"}
    names = {one["name"] for one in dashboard()["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", " ".join(queries()))) - {"__rate_interval", "labels"} <= names
