from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kube_api import endpoint, endpoint_slice

from lengthwise.gateway.config import Engine, Tls
from lengthwise.gateway.fleet.discovery import Slices

LIKE = Engine("http://found", api_key="k", concurrency=3)


def found(*items, port="8000"):
    slices = Slices(port, LIKE)
    slices.replace(list(items))
    return {one.name: (one.engine.url, one.up) for one in slices.endpoints()}


def test_engines_of_several_slices_by_the_names_of_their_pods():
    one = endpoint_slice("a", [endpoint("10.0.0.1", pod="e-0"), endpoint("10.0.0.2", pod="e-1")])
    two = endpoint_slice("b", [endpoint("10.0.0.3")])
    assert found(one, two) == {
        "e-0": ("http://10.0.0.1:8000", True),
        "e-1": ("http://10.0.0.2:8000", True),
        "10.0.0.3:8000": ("http://10.0.0.3:8000", True),
    }


@pytest.mark.parametrize(
    ("conditions", "up"),
    [
        ({"ready": True}, True),
        ({"ready": None}, True),  # unknown counts as ready
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "terminating": True}, False),
    ],
)
def test_conditions(conditions, up):
    item = endpoint_slice("a", [endpoint("10.0.0.1", pod="e-0", **conditions)])
    assert found(item)["e-0"][1] is up


def test_a_pod_in_slices_of_both_families_is_one_engine_by_its_ipv4_address():
    six = endpoint_slice("a6", [endpoint("fd00::1", pod="e-0")], family="IPv6")
    four = endpoint_slice("b4", [endpoint("10.0.0.1", pod="e-0")])
    assert found(six, four) == {"e-0": ("http://10.0.0.1:8000", True)}
    assert found(six) == {"e-0": ("http://[fd00::1]:8000", True)}


def test_a_pod_that_terminates_in_one_slice_is_leaving_whatever_another_reports():
    old = endpoint_slice("a", [endpoint("10.0.0.1", pod="e-0", ready=True)])
    new = endpoint_slice("b", [endpoint("10.0.0.1", pod="e-0", ready=False, terminating=True)])
    assert found(old, new)["e-0"] == ("http://10.0.0.1:8000", False)


def test_a_pod_that_moves_between_slices_is_up_while_one_of_them_reports_so():
    old = endpoint_slice("a", [endpoint("10.0.0.1", pod="e-0", ready=False)])
    new = endpoint_slice("b", [endpoint("10.0.0.1", pod="e-0", ready=True)])
    assert found(old, new)["e-0"][1] is True


def test_ports_by_name_and_by_number():
    item = endpoint_slice("a", [endpoint("10.0.0.1", pod="e-0")], port=9000, port_name="openai")
    assert found(item, port="openai") == {"e-0": ("http://10.0.0.1:9000", True)}
    assert found(item, port="8000") == {"e-0": ("http://10.0.0.1:8000", True)}
    assert found(item, port="metrics") == {}


def test_two_pods_of_one_name_go_by_their_addresses():
    one = endpoint("10.0.0.1", pod="e-0")
    two = endpoint("10.0.0.2", pod="e-0")
    two["targetRef"]["uid"] = "another"
    assert set(found(endpoint_slice("a", [one, two]))) == {"10.0.0.1:8000", "10.0.0.2:8000"}


def test_what_holds_of_all_holds_of_each_and_certificates_mean_https():
    slices = Slices("8000", Engine("http://found", api_key="k", concurrency=3, tls=Tls(ca="ca.pem")))
    slices.put(endpoint_slice("a", [endpoint("10.0.0.1", pod="e-0")]))
    engine = slices.endpoints()[0].engine
    assert (engine.api_key, engine.concurrency, engine.url) == ("k", 3, "https://10.0.0.1:8000")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "metadata",
                    "name",
                    "endpoints",
                    "addresses",
                    "conditions",
                    "ready",
                    "targetRef",
                    "uid",
                    "ports",
                    "port",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JUNK, JUNK)
def test_slices_of_any_shape_never_raise_and_never_hide_a_good_one(one, two):
    slices = Slices("http", LIKE)
    slices.replace([one, endpoint_slice("good", [endpoint("10.0.0.1", pod="e-0")])])
    slices.put(two)
    slices.drop(one)
    slices.put(endpoint_slice("good", [endpoint("10.0.0.1", pod="e-0")]))
    assert "http://10.0.0.1:8000" in {engine.engine.url for engine in slices.endpoints()}
