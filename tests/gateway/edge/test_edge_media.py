"""URLs in bodies: engines fetch nothing from hosts that the operator has not listed."""

from __future__ import annotations

import ipaddress
import json
import socket
from urllib.parse import urlsplit

import pytest
import urllib3
import yarl
from edge_serving import Served, a_key, chat, config
from hypothesis import example, given
from hypothesis import strategies as st

from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.edge.media_urls import MediaUrls, is_public
from lengthwise.schema.errors import InputError

METADATA = "http://169.254.169.254/latest/meta-data"


def part(**fields):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, fields]}]}


PLACES = [
    lambda url: part(type="image_url", image_url={"url": url, "detail": "high"}),
    lambda url: part(type="image_url", image_url=url),
    lambda url: part(type="audio_url", audio_url={"url": url}),
    lambda url: part(type="video_url", Video_URL={"url": url}),
    lambda url: part(type="file", file={"file_data": url}),
    lambda url: part(type="image", source={"type": "url", "url": url}),
    lambda url: part(type="unknown", whatever={"deep": [{"er": url}]}),
    lambda url: part(type="tool_result", content=[{"type": "image", "source": {"type": "url", "url": url}}]),
    lambda url: {"system": [{"type": "image", "source": {"url": url}}]},
    lambda url: {"input": [{"type": "message", "content": [{"type": "input_image", "image_url": url}]}]},
    lambda url: {"input": [{"type": "computer_call_output", "output": {"image_url": url}}]},
    lambda url: {"input": [{"content": [{"type": "input_file", "file_url": url}]}]},
    lambda url: {"input": [{"text": "a", "image": url}]},
    lambda url: {"input": "Hello", "ref_audio": url},
    lambda url: {"input": "Hello", "tools": [{"type": "mcp", "server_url": url}]},
    lambda url: {"mcp_servers": [{"type": "url", "url": url}]},
    lambda url: {"query": {"content": [{"type": "image_url", "image_url": {"url": url}}]}, "documents": ["a"]},
    lambda url: {"query": "a", "documents": ["http://10.0.0.1/ is a text", {"image": url}]},
]


def allows(content, *hosts) -> bool:
    try:
        MediaUrls(hosts).check(json.dumps(content).encode(), content)
    except Fault as fault:
        return (fault.status, fault.code) != (400, "url_not_allowed")
    return True


@pytest.mark.parametrize("place", PLACES)
def test_every_place_of_a_url_is_checked(place):
    for hosts, url, expected in [
        ((), "data:image/png;base64,AAAA", True),
        ((), "https://images.example.com/cat.png", False),
        (("images.example.com",), "https://images.example.com/cat.png", True),
        (("*.example.com",), "https://images.example.com/cat.png", True),
        (("*.example.com:8443",), "https://images.example.com:8443/cat.png", True),
        (("*.example.com:8443",), "https://images.example.com/cat.png", False),
        (("*",), "https://images.example.com/cat.png", True),
        (("*",), METADATA, False),
        (("*",), "file:///etc/passwd", False),
    ]:
        assert allows(place(url), *hosts) is expected, (hosts, url)


def test_texts_that_mention_urls_pass():
    call = {"type": "function", "function": {"name": "open", "arguments": json.dumps({"url": METADATA})}}
    for content in (
        {"messages": [{"role": "user", "content": f"What is at {METADATA}?"}]},
        part(type="text", text=METADATA),
        part(type="tool_use", id="t", name="open", input={"url": METADATA}),
        part(type="tool_result", tool_use_id="t", content=METADATA),
        {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [call]}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": METADATA}]},
        {"input": [{"content": [{"type": "output_text", "text": "a", "annotations": [{"url": METADATA}]}]}]},
        {"messages": [], "documents": [{"title": METADATA, "url": METADATA}]},
        {"messages": [], "tools": [{"function": {"parameters": {"url": {"default": METADATA}}}}]},
        {"query": "a", "documents": [METADATA]},
    ):
        assert allows(content), content


HOSTS = st.one_of(
    st.integers(0, 2**32 - 1).flatmap(
        lambda n: st.sampled_from([str(n), hex(n), oct(n).replace("0o", "0"), socket.inet_ntoa(n.to_bytes(4, "big"))])
    ),
    st.lists(st.integers(0, 300).flatmap(lambda n: st.sampled_from([str(n), hex(n), f"0{n:o}"])), max_size=5).map(
        ".".join
    ),
    st.ip_addresses(v=6).map(lambda one: f"[{one}]"),
)


@given(HOSTS)
@example("127.1")
@example("0x7f000001")
@example("0177.0.0.1")
@example("[::ffff:169.254.169.254]")
@example("[64:ff9b::a9fe:a9fe]")
@example("localhost")
@example("metadata.google.internal")
@example("100.100.100.200")
def test_no_form_of_a_private_address_is_public(host):
    """``inet_aton`` is what resolvers of the C library take as a number."""
    try:
        address = ipaddress.ip_address(socket.inet_ntoa(socket.inet_aton(host)))
    except OSError:
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            address = None
    if address is None or not address.is_global:
        assert not is_public(host)
    assert allows(part(type="image_url", image_url=f"http://{host}/"), "*") is is_public(host) or not host.isascii()


PIECES = ("a.example", "b.example", "127.0.0.1", "[::1]", "@", ":", "80", "/", "\\", "?", "#", "%2f", "\t", " ", "user")


@given(st.lists(st.sampled_from(PIECES), max_size=6).map(lambda pieces: "http://" + "".join(pieces)))
@example("http://a.example#@b.example/")
@example("http://b.example\\@a.example/")
@example("http://a.example:80@b.example/")
@example("http://a.example/@b.example")
def test_parsers_agree_about_the_host_of_a_url_that_passes(url):
    if allows(part(type="image_url", image_url=url), "*"):
        host = urlsplit(url).hostname
        assert host == urllib3.util.parse_url(url).host.strip("[]") == yarl.URL(url).host
        assert is_public(host)


def test_hosts_are_exact_with_their_ports():
    listed = ("images.example.com", "files.example.com:8443", "10.0.0.5", "*.cdn.example.com")
    for url, expected in {
        "http://images.example.com/a": True, "https://IMAGES.example.com:443/a?b#c": True,
        "https://images.example.com:444/": False, "https://images.example.com./": False,
        "https://files.example.com:8443/": True, "https://files.example.com/": False, "http://10.0.0.5/a": True,
        "http://10.0.0.6/": False, "https://a.cdn.example.com/": True, "https://cdn.example.com/": False,
        "https://evilcdn.example.com/": False, "https://u@images.example.com/": False, "//images.example.com/": False,
        "images.example.com/a": False, "https://images.example.com\\@10.0.0.1/": False, "DATA:,": False,
    }.items():  # fmt: skip
        assert allows(part(type="image_url", image_url={"url": url}), *listed) is expected, url
    with pytest.raises(InputError, match="media_hosts must be names"):
        Limits(media_hosts=("https://images.example.com",))


def test_the_edge_refuses_urls_before_an_engine_sees_them():
    with Served(config(a_key(), media_hosts=("images.example.com",))) as served:
        for path, body in [
            ("/v1/chat/completions", chat() | part(type="image_url", image_url={"url": METADATA})),
            ("/v1/responses", {"model": "tiny", "input": [{"content": [{"image_url": METADATA}]}]}),
            ("/v1/messages", chat() | part(type="image", source={"type": "url", "url": METADATA})),
            ("/tokenize", chat() | part(type="image_url", image_url={"url": METADATA})),
            ("/v1/embeddings", {"model": "tiny", "input": [{"image": METADATA}]}),
        ]:  # fmt: skip
            status, _, answer = served.submit(body, path=path)
            assert (status, "169.254.169.254" in answer["error"]["message"]) == (400, True), (path, answer)
        good = chat() | part(type="image_url", image_url={"url": "https://images.example.com/a"})
        assert served.submit(good)[0] == 200
        twice = json.dumps(good).replace('{"url":', f'{{"url": "{METADATA}", "url":').encode()
        assert served.submit(twice)[2]["error"]["code"] == "duplicate_field"
        form = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        fields = form % (b"model", b"tiny") + form % (b"url", METADATA.encode()) + b"--b--\r\n"
        kind = {"content_type": "multipart/form-data; boundary=b"}
        assert served.submit(fields, path="/v1/audio/transcriptions", **kind)[2]["error"]["code"] == "url_not_allowed"
        assert len(served.script.client_request) == 1
