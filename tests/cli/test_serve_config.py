"""A gateway's file: its settings reach the gateway, and settings that it must not contain are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import socket
import tomllib

import pytest

from lengthwise.config import gateway as places
from lengthwise.config import gateway as room
from lengthwise.config import gateway_reader, load_gateway, loads_gateway
from lengthwise.config.gateway import GatewayFile, PhasesSection
from lengthwise.gateway import config as reported
from lengthwise.gateway.relay import open_session
from lengthwise.schema.errors import InputError, ScenarioError

ENGINE = 'engines = ["http://a:8000"]\n'
DIGEST = hashlib.sha256(b"sk-secret").hexdigest()
OTHER = hashlib.sha256(b"sk-other").hexdigest()

FULL = f"""
order = "srtf"
[listen]
host = "0.0.0.0"
port = 9000
admin_port = "none"
[[engines]]
url = "http://a:8000"
[[engines]]
url = "https://b/v1"
name = "b"
kind = "sglang"
concurrency = 4
probe = false
[discovery]
dns = "pods.default.svc:8000"
every_s = "10s"
engine = {{ kind = "vllm" }}
[admission]
max_predicted_wait_s = "2min"
[[keys]]
tenant = "chat"
sha256 = "{DIGEST.upper()}"
models = ["m"]
priority = -1
rate_rps = 2.5
concurrency = 3
[limits]
values = 50_000
[dispatch.phases]
prefill_batch = 4
decode_steps = 3
"""


def wrong(text: str, *overrides: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        loads_gateway(text, overrides=overrides)
    return str(caught.value)


def test_a_file_becomes_the_gateway_config():
    config = loads_gateway(FULL).config
    assert config == reported.GatewayConfig(
        engines=(
            reported.Engine("http://a:8000"),
            reported.Engine("https://b/v1", name="b", kind="sglang", concurrency=4, probe=False),
        ),
        discovery=reported.Discovery(
            dns="pods.default.svc:8000", every_s=10.0, engine=reported.Engine("http://found", kind="vllm")
        ),
        order=reported.Order(mode="srtf"),
        admission=reported.Admission(max_predicted_wait_s=120.0),
        keys=(reported.Key("chat", DIGEST, ("m",), -1, 2.5, concurrency=3),),
        dispatch=reported.Dispatch(phases=reported.Phases(4, 3)),
        limits=reported.Limits(values=50_000),
        listen=reported.Listen(host="0.0.0.0", port=9000, admin_port=None),
    )


def test_defaults_and_names_are_those_of_the_gateway():
    config = loads_gateway(ENGINE).config
    assert config == reported.GatewayConfig(engines=(reported.Engine("http://a:8000"),))
    parts = {field.name: field.type for field in dataclasses.fields(reported.GatewayConfig)}
    assert set(GatewayFile.model_fields) == {*parts, "engine_tls"}, "which becomes the default of each engine"
    for name in ("order", "admission", "dispatch", "prediction", "limits", "resilience", "listen", "discovery"):
        section = GatewayFile.model_fields[name].annotation
        assert set(section.model_fields) == {
            field.name for field in dataclasses.fields(getattr(reported, str(parts[name])))
        }


@pytest.mark.parametrize("name", ["kind", "mode", "fairness", "statistic"])
def test_choices_are_those_of_the_gateway(name):
    words = {
        "kind": reported.KINDS,
        "mode": reported.MODES,
        "fairness": reported.FAIRNESS,
        "statistic": reported.STATISTICS,
    }
    section = {"kind": '[discovery.engine]\nkind="{}"', "statistic": '[prediction]\nstatistic="{}"'}
    text = section.get(name, f'[order]\n{name}="{{}}"')
    phases = "\n[dispatch.phases]\nprefill_batch = 1\ndecode_steps = 1"
    for word in words[name]:
        loads_gateway(ENGINE + text.format(word) + phases)
    stated = wrong(ENGINE + text.format("xyzzy"))
    assert "must be" in stated
    assert "did you mean" not in stated


def test_phases_are_those_of_the_gateway():
    parts = {field.name for field in dataclasses.fields(reported.Phases)}
    assert set(PhasesSection.model_fields) == parts
    text = "[dispatch.phases]\nprefill_batch = 4\ndecode_steps = 3\ndecode_batch = 9.5\n"
    text += "mean_prompt_tokens = 12\nthreshold = 0.25\n"
    phases = loads_gateway(ENGINE + text, overrides=["order.mode=rra"]).config.dispatch.phases
    assert phases == reported.Phases(4, 3, 9.5, 12.0, 0.25)


def test_the_printed_file_is_equivalent():
    settings = loads_gateway(FULL)
    assert loads_gateway(settings.toml).config == settings.config
    assert tomllib.loads(settings.toml)["limits"]["depth"] == reported.Limits().depth


def test_yaml_is_equivalent():
    text = "engines:\n  - http://a:8000\norder:\n  mode: bins\n  max-wait-s: 30s\n"
    order = loads_gateway(text, suffix=".yaml").config.order
    assert (order.mode, order.max_wait_s) == ("bins", 30.0)


def test_overrides_are_the_last_word(tmp_path):
    path = tmp_path / "gateway.toml"
    path.write_text(FULL)
    given = ["order.mode=fcfs", "order.mode=bins", "listen.port=1", "admission.max_predicted_wait_s=inf"]
    settings = load_gateway(path, given, ["http://c:1"])
    assert settings.config.order.mode == "bins"
    assert settings.config.listen.port == 1
    assert math.isinf(settings.config.admission.max_predicted_wait_s)
    assert [engine.url for engine in settings.config.engines] == [
        "http://a:8000", "https://b/v1", "http://c:1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('engine = ["http://b:1"]\n', "engine: there is no such key; did you mean engines?"),
        ("[lsten]\nport = 1\n", "lsten: there is no such key; did you mean listen?"),
        ("[listen]\nprot = 1\n", "listen.prot: there is no such key; did you mean listen.port?"),
        ("[order]\nmax_queued = 1\n", "did you mean admission.max_queued?"),
        ("[listen]\nport = 70000\n", "listen.port: must be at most 65535; it is 70000"),
        ('[order]\nmode = "isrft"\n', "; it is 'isrft'; did you mean 'isrtf'?"),
        ('[order]\nmode = "window"\n', "; it is 'window'; did you mean 'windowed'?"),
        ('[order]\nmode = "SRTF"\n', "; it is 'SRTF'; did you mean 'srtf'?"),
        ("[order]\nmax_wait_s = -1\n", "order.max_wait_s: must be at least 0"),
        ("[order]\nmax_wait_s = nan\n", "order.max_wait_s: must be a number"),
        ('[order]\nrank = "srf"\n', "Did you mean: srtf"),
        ('[order]\npreemption = "always"\n', "order.preemption: there is no preemption policy"),
        ("[dispatch]\nstart = 600\n", "min_concurrency <= start <= max_concurrency"),
        ('[order]\nmode = "rra"\n', "mode rra must have [dispatch.phases]"),
        ('[dispatch]\nrouter = "cache-aware"\n', "dispatch.router: there is no router named 'cache-aware'"),
        ('[dispatch]\nrouter = "prefix_precise"\n', "the contents of the engines' caches"),
        ('[dispatch]\nrouter = "cache_aware"\nprefixes = "none"\n', "chooses by prefixes that prompts share"),
        ('[order]\nmode = "waa-c"\n', "`lengthwise schedule SCENARIO --deploy DIR` writes their commands"),
        (
            "[dispatch.phases]\nprefill_batch = 0\ndecode_steps = 3\n",
            "dispatch.phases.prefill_batch: must be at least 1",
        ),
        ("[dispatch.phases]\nprefill_batch = 4\n", "dispatch.phases.decode_steps"),
        (
            "[dispatch.phases]\nprefill_batch = 4\ndecode_steps = 3\nthreshold = 0.1\n",
            "threshold must have decode_batch and mean_prompt_tokens",
        ),
        (
            "[dispatch.phases]\nprefill_batch = 4\ndecode_steps = 3\nmax_requests = 3\n",
            "max_requests must be a whole number of at least 4",
        ),
        ('[discovery]\nendpoint_slices = "engines:8000"\n', "must be namespace/service:port"),
        ('[discovery]\ndns = "engines"\n', "must be host:port"),
        ('[prediction]\npredictor = "mine.lwp"\n', "prediction.predictor: there is no file mine.lwp"),
        ('[listen]\ntls = { cert = "c.pem" }\n', "cert and key belong together"),
        ("[listen]\nadmin_port = 8000\n", "must differ from port"),
        (
            '[listen]\ntrace = "collector:4318"\n',
            "listen.trace: the address of a collector (OTLP over HTTP) must begin",
        ),
        ('[listen]\ntrace = "http://"\n', "and name a host, with a port of 1 to 65535; it is 'http://'"),
        ('[listen]\ntrace = "http://c:70000"\n', "with a port of 1 to 65535; it is 'http://c:70000'"),
        ('[listen]\ntrace = "http://c:4318?a=1"\n', "must be host, port and path alone"),
        ('[listen]\nproxies = "lb.local"\n', "listen.proxies: must be addresses with commas"),
        ('[listen]\nproxies = "10.0.0.7, 300.1.2.3"\n', "'300.1.2.3' is none"),
        ('[listen]\nproxies = "10.0.0.7/8"\n', "did you mean 10.0.0.0/8?"),
        ('[listen]\nproxies = "*, 10.0.0.7"\n', "'*' is none"),
        ('[discovery]\napi_url = "kubernetes"\n', "discovery.api_url: the address of the Kubernetes API must begin"),
    ],
)
def test_what_cannot_be_used_is_named(text, message):
    assert message in wrong(ENGINE + text)


def test_all_problems_are_reported_at_once_and_overrides_by_their_name():
    text = wrong(ENGINE + "[listen]\nprot = 1\n[care]\nfailures = 0\n", "limits.n=none")
    assert "3 problems" in text
    assert "--set limits.n: must be a whole number" in text


def test_a_gateway_without_engines_is_refused():
    assert "needs an engine" in wrong("")
    assert "occurs twice" in wrong('engines = ["http://a:1", "http://a:1/v1"]')
    for url in ("a:1", "http://:80", "http://a:70000", "http://a:0", "http://a b"):
        assert (
            f"must begin with http:// or https:// and name a host, with a port of 1 to 65535; it is {url!r}"
            in wrong(f'engines = ["{url}"]')
        )


@pytest.mark.parametrize(
    "text",
    [
        ENGINE + '[[keys]]\ntenant = "a"\nkey = "sk-secret"\n',
        ENGINE + '[[keys]]\ntenant = "a"\nsha256 = "sk-secret"\n',
        '[[engines]]\nurl = "http://a:1"\napi_key = "sk-secret"\n',
        ENGINE + '[discovery.engine]\napi_key = "sk-secret"\n',
    ],
)
def test_a_key_in_clear_text_is_refused_and_not_repeated(text):
    stated = wrong(text)
    assert "sk-secret" not in stated
    assert "digest" in stated or "must not stand in the file" in stated


def test_keys_come_from_the_sources_in_the_file(tmp_path, monkeypatch):
    (tmp_path / "engine").write_text("sk-engine\n")
    (tmp_path / "keys").write_text(f"# the team\nchat:{DIGEST}\n\nbatch:two:{OTHER} # colons are fine\n")
    monkeypatch.setenv("ENGINE_KEY", "sk-env")
    text = """
engines = [
  { url = "http://a:1", api_key_file = "engine" },
  { url = "http://b:1", api_key_env = "ENGINE_KEY" },
]
[[keys]]
key_file = "keys"
rate_rps = 5
"""
    settings = loads_gateway(text, folder=tmp_path)
    assert [engine.api_key for engine in settings.config.engines] == ["sk-engine", "sk-env"]
    assert [(key.tenant, key.sha256, key.rate_rps) for key in settings.config.keys] == [
        ("chat", DIGEST, 5.0), ("batch:two", OTHER, 5.0),
    ]  # fmt: skip
    assert "sk-" not in settings.toml
    assert "sk-" not in repr(settings.config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        ("chat\n", "line 1 of keys must be tenant:sha256"),
        (f"chat:{DIGEST}\nbatch:sk-plain\n", "line 2 of keys must be the 64 hex digits"),
        (f"chat:{DIGEST}\nbatch:{DIGEST}\n", "one key is given twice, to chat and batch"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused(tmp_path, text, message):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ScenarioError) as caught:
        loads_gateway(ENGINE + '[[keys]]\nkey_file = "keys"\n', folder=tmp_path)
    assert message in str(caught.value)
    assert "sk-plain" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('tenant = "a"', "exactly one of sha256, sha256_env, sha256_file, key_file"),
        (f'sha256 = "{DIGEST}"', "keys.0.tenant: is missing"),
        ('tenant = "a"\nkey_file = "k"', "given by the lines of key_file"),
        ('key_file = "nowhere"', "cannot read nowhere"),
        ('tenant = "a"\nsha256_env = "NOT_THERE_AT_ALL"', "NOT_THERE_AT_ALL must hold the digest; it is not set"),
    ],
)
def test_a_key_that_cannot_be_had_is_named(table, message):
    assert message in wrong(f"{ENGINE}[[keys]]\n{table}\n")


def test_the_file_is_read_again_keys_too(tmp_path):
    path, keys = tmp_path / "gateway.toml", tmp_path / "keys"
    path.write_text(ENGINE + '[[keys]]\nkey_file = "keys"\n')
    keys.write_text(f"chat:{DIGEST}\n")
    again = gateway_reader(path, ["order.mode=fcfs"])
    assert [key.tenant for key in again().keys] == ["chat"]
    keys.write_text(f"chat:{DIGEST}\nbatch:{OTHER}\n")
    assert [key.tenant for key in again().keys] == ["chat", "batch"]
    keys.write_text("nonsense\n")
    with pytest.raises(ScenarioError):
        again()


def test_a_journal_starts_at_the_folder_of_the_file(tmp_path):
    text = ENGINE + '[listen]\njournal = "day.jsonl"\n'
    assert loads_gateway(text, folder=tmp_path).config.listen.journal == str(tmp_path / "day.jsonl")


@pytest.mark.parametrize("scheme", ["http", "ftp"])
def test_a_password_in_an_address_is_not_repeated(scheme):
    for text in (f'engines = ["{scheme}://me:sk-secret@:1"]', f"{ENGINE}listen.trace = '{scheme}://me:sk-secret@c'"):
        assert "sk-secret" not in wrong(text)


def test_an_unwritable_journal_is_reported_before_the_start(tmp_path):
    def stated(journal: str) -> str:
        with pytest.raises(ScenarioError) as caught:
            loads_gateway(ENGINE + f'[listen]\njournal = "{journal}"\n', folder=tmp_path)
        return str(caught.value)

    (tmp_path / "file").write_text("")
    assert f"listen.journal: must be a file that can be written; {tmp_path} is a folder" in stated(".")
    assert f"there is no folder {tmp_path / 'none'}: make it" in stated("none/day.jsonl")
    assert f"there is no folder {tmp_path / 'file'}" in stated("file/day.jsonl")
    assert loads_gateway(ENGINE + '[listen]\njournal = "file"\n', folder=tmp_path).config.listen.journal


def test_where_this_user_may_not_write_no_journal_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(places.os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(ScenarioError, match=f"{tmp_path} cannot be written by this user"):
        loads_gateway(ENGINE + '[listen]\njournal = "day.jsonl"\n', folder=tmp_path)
    (tmp_path / "day.jsonl").write_text("")
    loads_gateway(ENGINE + '[listen]\njournal = "day.jsonl"\n', folder=tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        'proxies = "10.0.0.7, fd00::/8,127.0.0.1"',
        'proxies = "*"',
        'trace = "http://collector:4318"',
        'trace = "https://[::1]/v1/traces"',
    ],
)
def test_what_names_proxies_and_collectors_is_taken(line):
    name, _, value = line.partition(" = ")
    assert getattr(loads_gateway(f"{ENGINE}[listen]\n{line}\n").config.listen, name) == value.strip('"')


def test_a_missing_or_wrong_file_is_reported(tmp_path):
    with pytest.raises(ScenarioError, match="there is no gateway file"):
        load_gateway(tmp_path / "none.toml")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ScenarioError, match="a gateway file ends in"):
        room.load_gateway(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("url", "listen", "port"),
    [
        ("http://localhost:8000", "", "port"),
        ("http://127.0.0.1:8001/v1", "", "admin port"),
        ("http://[::1]:9000", "port = 9000", "port"),
        ("http://10.0.0.7:8000", 'host = "10.0.0.7"', "port"),
        (f"http://{socket.gethostname()}:8000", 'host = "0.0.0.0"', "port"),
        ("http://localhost", "port = 80", "port"),
    ],
)
def test_a_gateway_is_not_its_own_engine(url: str, listen: str, port: str):
    stated = wrong(f'engines = ["http://a:1", "{url}"]\n[listen]\n{listen}\n')
    assert f"the gateway's {port} must differ from its engines' ports" in stated
    assert url in stated
    assert "8080" in stated


def test_no_error_reveals_the_password_of_an_engine():
    url = "http://user:hunter2@localhost:8000"
    for text in (f'engines = ["{url}"]\n', f'engines = ["{url}", "{url}"]\n'):
        stated = wrong(text)
        assert "localhost:8000" in stated
        assert "hunter2" not in stated
    engine = reported.Engine("https://user:hunter2@localhost:1", tls=reported.Tls(ca="nowhere.pem"))
    with pytest.raises(InputError, match="certificates of engine https://localhost:1 ") as caught:
        open_session(engine, reported.ResilienceConfig())
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "listen"),
    [
        ("http://gpu-2:8000", ""),
        ("http://localhost:8002", ""),
        ("http://localhost:8001", 'admin_port = "none"'),
        ("http://10.0.0.7:8000", 'host = "10.0.0.8"'),
        ("http://localhost:80", "port = 0"),
    ],
)
def test_an_engine_elsewhere_may_have_the_same_port(url: str, listen: str):
    assert loads_gateway(f'engines = ["{url}"]\n[listen]\n{listen}\n').config.engines[0].url == url


def test_every_secret_has_a_variable_and_a_file_and_is_shown_nowhere(tmp_path, monkeypatch):
    (tmp_path / "digest").write_text(f"{DIGEST}\n")
    (tmp_path / "url").write_text("postgresql://u:pa55@db/g\n")
    (tmp_path / "key").write_text("sk-5ecret\n")
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setenv("DIGEST", DIGEST)
    text = """
[[engines]]
url = "http://user:pa55@a:8000"
api_key_file = "key"
[tenants]
store_file = "url"
admin_sha256_file = "digest"
progress = "."
[[keys]]
tenant = "a"
sha256_file = "digest"
[[listen.admins]]
name = "alice"
role = "operator"
sha256_env = "DIGEST"
"""
    settings = loads_gateway(text, folder=tmp_path)
    config = settings.config
    assert config.listen.admins == (reported.AdminUser("alice", DIGEST, "operator"),)
    assert (config.engines[0].api_key, config.tenants.store) == ("sk-5ecret", "postgresql://u:pa55@db/g")
    assert config.tenants.admin_sha256 == config.keys[0].sha256 == DIGEST
    for shown in (repr(config), settings.toml):
        assert not any(secret in shown for secret in ("pa55", "sk-5ecret"))
    for name, message in {
        'admin_sha256_file = "empty"\nstore = "t.db"': "the file empty must hold the digest; it is empty",
        'store = "t.db"\nstore_env = "S"': "tenants.store_env: means the same as store; keep one of them",
        'store = "t.db"': "tenants.store must have a user of its API",
        'store = "mysql://h/d"': "tenants.store: must be an SQLite file, or the URL postgresql://HOST/DATABASE",
        'store_file = "nowhere"': "cannot read",
    }.items():
        with pytest.raises(ScenarioError) as caught:
            loads_gateway(f"{ENGINE}[tenants]\n{name}\n", folder=tmp_path)
        assert message in str(caught.value)
    assert "a and b have the same token" in wrong(
        ENGINE + "".join(f'[[listen.admins]]\nname = "{name}"\nsha256 = "{DIGEST}"\n' for name in "ab")
    )
