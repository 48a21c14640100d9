from __future__ import annotations

import asyncio
import random
import ssl
from contextlib import asynccontextmanager

import pytest
import trustme
from fleet_world import run, until
from kube_api import KubeApi, endpoint, endpoint_slice
from relay_world import pause

from lengthwise.gateway.config import Engine
from lengthwise.gateway.fleet.discovery import EndpointSlices
from lengthwise.schema.errors import InputError

LIKE = Engine("http://found")
PATH = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"


class Report:
    def __init__(self):
        self.all = []

    def __call__(self, found):
        self.all.append({one.name: one.up for one in found})

    @property
    def last(self):
        return self.all[-1] if self.all else None


def pods(*names, slice_name="a", **conditions):
    rows = [endpoint(f"10.0.0.{k + 1}", pod=name, **conditions) for k, name in enumerate(names)]
    return endpoint_slice(slice_name, rows)


@asynccontextmanager
async def watched(api, tmp_path, **extra):
    reported = Report()
    source = EndpointSlices(
        "default/engines:8000", LIKE, api_url=api.url, account=tmp_path, rng=random.Random(1), **extra
    )
    task = asyncio.create_task(source.run(reported))
    try:
        yield reported
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def scripted(work, tmp_path, **extra):
    """Runs against an API that knows of two pods, once both are reported."""

    async def complete():
        async with KubeApi() as api:
            api.put(pods("e-0", "e-1"))
            async with watched(api, tmp_path, **extra) as reported:
                await until(lambda: reported.last == {"e-0": True, "e-1": True} and api.open == 1)
                await work(api, reported)
            await until(lambda: api.open == 0)

    run(complete)


def test_changes_come_by_the_watch_alone(tmp_path):
    async def work(api, report):
        api.put(pods("e-0", "e-1", "e-2"))
        await until(lambda: set(report.last) == {"e-0", "e-1", "e-2"})
        api.put(pods("e-9", slice_name="b"))
        api.delete("a")
        await until(lambda: set(report.last) == {"e-9"})
        api.put(pods("e-9", slice_name="b", ready=False, terminating=True))
        await until(lambda: report.last == {"e-9": False})
        api.delete("b")
        await until(lambda: report.last == {})
        assert (api.lists, api.watches) == (1, 1)
        assert api.paths == {PATH}

    scripted(work, tmp_path)


def test_a_watch_that_ends_goes_on_from_where_it_was_without_a_list(tmp_path):
    async def work(api, report):
        for k in range(3):
            api.end_watches()
            api.put(pods("e-0", f"new-{k}"))  # while no client watches
            await until(lambda k=k: set(report.last) == {"e-0", f"new-{k}"})
        assert api.lists == 1

    scripted(work, tmp_path)


def test_an_event_that_breaks_off_in_its_middle_is_not_lost(tmp_path):
    async def work(api, report):
        api.faults.cut_next = True
        api.put(pods("e-5"))
        await until(lambda: set(report.last) == {"e-5"})
        assert (api.lists, api.watches) == (1, 2)

    scripted(work, tmp_path)


def test_a_version_that_is_too_old_means_a_new_list(tmp_path):
    async def work(api, report):
        api.faults.ends_at_once = True
        api.end_watches()
        api.put(pods("e-7"))
        api.clear()
        api.faults.ends_at_once = False
        await until(lambda: set(report.last) == {"e-7"})
        assert api.lists == 2

    scripted(work, tmp_path)


def test_410_inside_the_watch_means_a_new_list_too(tmp_path):
    async def work(api, report):
        api.send_all(b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n')
        await until(lambda: api.lists == 2 and api.open == 1)
        api.put(pods("e-7"))
        await until(lambda: set(report.last) == {"e-7"})

    scripted(work, tmp_path)


def test_bookmarks_move_the_version_on(tmp_path):
    async def work(api, report):
        api.bookmark()
        await pause(0.05)
        api.clear()  # all but the bookmark's own version
        api.end_watches()
        api.put(pods("e-7"))
        await until(lambda: set(report.last) == {"e-7"})
        assert api.lists == 1
        assert {} not in report.all

    scripted(work, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("line", [b"no json\n", b"[]\n", b'{"type":"ADDED"}\n', b'{"type":"ERROR","object":{}}\n'])
def test_what_is_no_event_means_a_new_list(line, tmp_path):
    async def work(api, report):
        api.send_all(line)
        await until(lambda: api.lists == 2)
        assert report.last == {"e-0": True, "e-1": True}

    scripted(work, tmp_path)


def test_a_silent_watch_is_restarted(tmp_path):
    async def work(api, report):
        api.faults.silent = True
        api.put(pods("e-7"))
        await pause(0.1)
        assert set(report.last) == {"e-0", "e-1"}
        api.faults.silent = False
        await until(lambda: set(report.last) == {"e-7"})
        assert api.lists == 1

    scripted(work, tmp_path, timeout_s=0.4)


def test_while_the_api_is_away_the_engines_stay(tmp_path):
    async def work(api, report):
        api.faults.status = 503
        api.end_watches()
        await pause(0.4)
        await api.stop()
        await pause(0.4)
        assert report.last == {"e-0": True, "e-1": True}
        api.faults.status = 0
        api.put(pods("e-7"))
        await api.start()
        await until(lambda: set(report.last) == {"e-7"})
        assert {} not in report.all

    scripted(work, tmp_path)


def test_it_does_not_hurry_an_api_that_refuses_it(tmp_path, caplog):
    async def work(api, report):
        api.faults.status = 403
        api.end_watches()
        await asyncio.sleep(1.0)
        assert api.lists + api.watches <= 12
        assert report.last == {"e-0": True, "e-1": True}

    scripted(work, tmp_path)
    assert "the role needs get, list and watch of endpointslices" in caplog.text


def test_a_flapping_endpoint_is_reported_in_its_final_state(tmp_path):
    async def work(api, report):
        for k in range(30):
            api.put(pods("e-0", "e-1", ready=bool(k % 2)))
        await until(lambda: len(report.all) >= 31)
        assert report.last == {"e-0": True, "e-1": True}
        assert api.lists == 1

    scripted(work, tmp_path)


def test_lists_come_in_pages_and_of_the_service_alone(tmp_path):
    async def work():
        async with KubeApi() as api:
            api.faults.page, api.faults.slow_s = 2, 0.01
            for k in range(5):
                api.put(endpoint_slice(f"s{k}", [endpoint(f"10.0.0.{k}", pod=f"e-{k}")]))
            api.put(endpoint_slice("foreign", [endpoint("10.0.1.1", pod="x")], service="another"))
            api.put(pods("elsewhere"), namespace="other")
            async with watched(api, tmp_path) as reported:
                await until(lambda: reported.last is not None)
                assert reported.last == {f"e-{k}": True for k in range(5)}
                assert api.lists == 3

    run(work)


def test_a_token_that_was_changed_is_read_again(tmp_path):
    async def work():
        async with KubeApi(token="first") as api:
            api.put(pods("e-0"))
            (tmp_path / "token").write_text("first\n")
            async with watched(api, tmp_path) as reported:
                await until(lambda: reported.last == {"e-0": True})
                api.token = "second"
                api.end_watches()
                api.put(pods("e-1"))
                await until(lambda: api.refused > 0)
                (tmp_path / "token").write_text("second\n")
                await until(lambda: reported.last == {"e-1": True})
                assert api.lists == 1

    run(work)


def test_an_authority_that_was_changed_is_read_again(tmp_path):
    old, new = trustme.CA(), trustme.CA()

    def served_by(authority):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        return context

    async def work():
        old.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
        async with KubeApi(tls=served_by(old)) as api:
            api.put(pods("e-0"))
            async with watched(api, tmp_path) as reported:
                await until(lambda: reported.last == {"e-0": True})
                await api.stop()
                async with KubeApi(tls=served_by(new), port=api.port) as rotated:
                    for name in ("e-0", "e-1"):
                        rotated.put(pods(name))
                    rotated.clear()
                    await pause(0.3)
                    assert reported.last == {"e-0": True}
                    assert not rotated.paths  # the new server is not trusted yet
                    new.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
                    await until(lambda: reported.last == {"e-1": True})

    run(work)


@pytest.mark.parametrize("place", ["engines:8000", "default/engines", "a/b/c:80", "/engines:80", ""])
def test_a_place_that_is_none_is_refused(place):
    with pytest.raises(InputError, match="namespace/service:port"):
        EndpointSlices(place, LIKE, api_url="http://127.0.0.1:1")


def test_outside_of_a_pod_an_address_is_required(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InputError, match="api_url"):
        EndpointSlices("default/engines:8000", LIKE)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert EndpointSlices("default/engines:8000", LIKE).client.url == "https://[fd00::1]:6443"
