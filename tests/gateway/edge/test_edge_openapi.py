"""The OpenAPI document, and requests generated from it: answers are as documented, and never a 500."""

from __future__ import annotations

import json

import pytest
import schemathesis
from edge_serving import SECRET, Script, Served, a_key, config
from hypothesis import settings
from jsonschema import Draft202012Validator

from lengthwise.gateway import edge
from lengthwise.gateway.apis import APIS
from lengthwise.gateway.edge import auth

CONFIG = config(a_key(), messages=8, n=4, max_tokens=4096)
SCRIPT = Script()
APP = edge.App(CONFIG, SCRIPT, models=tuple)
DOCUMENT = json.loads(APP.document)
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT).exclude(path_regex="embed|rerank|audio/[ts]|tokens|tokenize")
"""Without routes that are read as another one is."""


def test_the_document_is_a_valid_one_and_names_what_is_read():
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for api in APIS.values():
        assert set(schemas[api.body.__name__]["properties"]) == set(api.body.__struct_fields__)
        assert api.path in DOCUMENT["paths"]
    assert schemas["Chat"]["properties"]["n"]["maximum"] == 4


def test_without_keys_none_is_required():
    free = json.loads(edge.App(config(), SCRIPT, models=tuple).document)
    assert "securitySchemes" not in free["components"]
    assert free["paths"]["/v1/models"]["get"]["security"] == []


@pytest.fixture(scope="module")
def free_edge():
    """With no end to guessing: generated requests show wrong keys by the dozen."""
    with pytest.MonkeyPatch.context() as patch, Served(CONFIG, SCRIPT, models=()) as served:
        patch.setattr(auth, "MAX_FAILURES", 10**9)
        yield served


@pytest.mark.slow
@SCHEMA.parametrize()
@settings(max_examples=8)
def test_generated_requests(case, free_edge):
    headers = {"Authorization": f"Bearer {SECRET}"}
    case.call_and_validate(base_url=f"http://127.0.0.1:{free_edge.port}", headers=headers)
