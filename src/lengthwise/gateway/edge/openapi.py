"""The endpoints as an OpenAPI 3.1 document."""

from __future__ import annotations

from typing import Any

import msgspec

from lengthwise.gateway.apis import APIS, ENGINE_FIELDS, Api, Body
from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge.client_request import HINTS, MAX_LOGPROBS, MAX_NAME, MAX_STOPS

Json = dict[str, Any]
_STRING: Json = {"type": "string"}
_TEXT: Json = {"type": ["string", "null"]}
_REQUEST_ID: Json = {"x-request-id": {"schema": _STRING, "required": True}}
_ERRORS = {
    "400": "A field or the body is invalid",
    "401": "No key, or a wrong one",
    "404": "No such model, or not for this key",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is compressed, or not JSON or a form, as the route requires",
    "429": "Rate limit, quota, full queue or long predicted wait; retry after Retry-After",
    "431": "Header fields too many or too long",
    "500": "An error of the gateway",
    "502": "An error of an engine, or no answer in time",
    "503": "No engine, no memory, or the gateway stops; retry after Retry-After",
    "504": "The request's deadline passed",
}
_DESCRIPTION = "Routes of OpenAI and Anthropic in length-aware order. Fields that are not listed go on to the engine."


def document(limits: Limits, *, keys: bool) -> bytes:
    """Return the OpenAPI document as JSON. ``keys`` states whether requests need an API key."""
    security: list[Json] = [{"key": []}, {"xApiKey": []}] if keys else []
    components: Json = {"schemas": _schemas(limits)}
    if keys:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "xApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    name: Json = {"name": "model", "in": "path", "required": True, "schema": _STRING | {"minLength": 1}}
    gets = {
        "/v1/models": _operation("listModels", "Models", "400 401 429 431 503", security),
        "/v1/models/{model}": _operation("retrieveModel", "Model", "400 401 404 429 431 503", security)
        | {"parameters": [name]},
        "/health": _operation("health", "Status", "400 431", []),
        "/ready": _operation("ready", "Status", "400 431 503", []),
        "/openapi.json": _operation("openapi", "Object", "400 431", []),
    }
    paths = {api.path: {"post": _forwarded(name, api, security)} for name, api in APIS.items()}
    paths |= {path: {"get": operation} for path, operation in gets.items()}
    info = {"title": "lengthwise gateway", "version": "1", "description": _DESCRIPTION}
    return msgspec.json.encode({"openapi": "3.1.0", "info": info, "paths": paths, "components": components})


def _forwarded(name: str, api: Api, security: list[Json]) -> Json:
    error = "AnthropicError" if api.is_anthropic else "Error"
    operation = _operation(name, "Object", " ".join(_ERRORS), security, error)
    answer = operation["responses"]["200"]
    answer["description"] = "The response of the engine, or its events"
    if api.generates:
        answer["content"]["text/event-stream"] = {}
    else:
        answer["content"]["*/*"] = {}
    schema = "Form" if api.is_form else api.body.__name__
    content = _json(schema)
    if api.is_form:
        content = {"multipart/form-data": content["application/json"]}
    return operation | {"requestBody": {"required": True, "content": content}}


def _operation(name: str, schema: str, errors: str, security: list[Json], error: str = "Error") -> Json:
    responses: Json = {"200": {"description": "As requested", "headers": _REQUEST_ID, "content": _json(schema)}}
    retry = {"retry-after": {"schema": {"type": "integer", "minimum": 1}, "required": True}}
    for status in errors.split():
        headers = _REQUEST_ID | (retry if status in {"429", "503"} else {})
        responses[status] = {"description": _ERRORS[status], "headers": headers, "content": _json(error)}
    return {"operationId": name, "security": security, "responses": responses}


def _json(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _object(properties: Json, required: tuple[str, ...] = ()) -> Json:
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _integer(minimum: int, maximum: int) -> Json:
    return {"type": ["integer", "null"], "minimum": minimum, "maximum": maximum}


def _schemas(limits: Limits) -> Json:
    texts: Json = {"type": ["array", "null"], "items": _STRING, "maxItems": MAX_STOPS}
    any_object, raw = {"type": ["object", "null"]}, Json()
    part = {"type": "object", "properties": {"type": _STRING, "text": _TEXT}}
    parts = {"type": "array", "items": {"anyOf": [_STRING, part]}}
    content = {"anyOf": [_TEXT, parts]}
    message, item = (
        _object({"role": _STRING, "content": content}, ("role",)),
        {"type": "object", "properties": {"content": content}},
    )
    ids = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    many = {"type": "array", "minItems": 1, "maxItems": limits.messages}
    nested: Json = {"type": ["string", "array", "object"]}
    known: Json = {
        "model": _STRING | {"minLength": 1, "maxLength": MAX_NAME},
        "stream": {"type": ["boolean", "null"]},
        "n": _integer(1, limits.n),
        "best_of": _integer(1, limits.n),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _integer(1, limits.max_tokens)),
        **dict.fromkeys(("prompt_logprobs", "top_logprobs"), _integer(0, MAX_LOGPROBS)),
        "stop": {"anyOf": [_TEXT, texts]},
        "stop_sequences": texts,
        **dict.fromkeys(("user", "prompt_cache_key", "instructions"), _TEXT),
        "vllm_xargs": any_object | {"propertyNames": {"not": {"pattern": f"^{HINTS}"}}},
        "metadata": any_object,
        "background": {"enum": [None, False]},
        "messages": many | {"items": message},
        "system": content,
        "prompt": {"anyOf": [_STRING, many | {"items": _STRING}, ids, many | {"items": ids}]},
        "query": nested,
        "documents": nested,
    } | {name: {"enum": [None, 0]} if name == "priority" else {"type": "null"} for name in ENGINE_FIELDS}
    own: Json = {
        "Chat": {"logprobs": {"type": ["boolean", "null"]}, "documents": raw},
        "Completion": {"logprobs": _integer(0, MAX_LOGPROBS)},
        "Responses": {"input": {"anyOf": [_STRING, {"type": "array", "items": item}]}},
        "Input": {"input": {"type": ["string", "array", "null"]}, "messages": {"type": ["array", "null"]}},
    }

    def body(kind: type[Body]) -> Json:
        schemas = known | own.get(kind.__name__, {})
        fields = {name: schemas.get(name, raw) for name in kind.__struct_fields__}
        required = [field.name for field in msgspec.structs.fields(kind) if field.required]
        return _object(fields, tuple(required))

    model = {"id": _STRING, "object": {"const": "model"}, "created": {"type": "integer"}, "owned_by": _STRING}
    models = {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}
    error = _object({"type": _STRING, "message": _STRING})
    return {
        **{api.body.__name__: body(api.body) for api in APIS.values()},
        "Form": _object({"model": known["model"], "file": {"type": "string", "format": "binary"}}, ("model",)),
        "Models": _object({"object": {"const": "list"}, "data": models}),
        "Model": _object(model | {"max_model_len": {"type": "integer"}}, tuple(model)),
        "Status": _object({"status": _STRING}),
        "Object": {"type": "object"},
        "Error": _object({"error": _object({"message": _STRING, "type": _STRING, "param": _TEXT, "code": _TEXT})}),
        "AnthropicError": _object({"type": {"const": "error"}, "error": error}),
    }
