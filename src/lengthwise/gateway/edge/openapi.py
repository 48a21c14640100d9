"""The endpoints as an OpenAPI 3.1 document."""

from __future__ import annotations

from typing import Any

import msgspec

from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge.client_request import ENGINE_FIELDS, HINTS, MAX_LOGPROBS, MAX_NAME, MAX_STOPS

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
    "415": "The body is not plain JSON",
    "429": "Rate limit, quota, full queue or long predicted wait; retry after Retry-After",
    "431": "Header fields too many or too long",
    "500": "An error of the gateway",
    "502": "An error of an engine, or no answer in time",
    "503": "No engine, no memory, or the gateway stops; retry after Retry-After",
    "504": "The request's deadline passed",
}
_DESCRIPTION = "Completions by OpenAI's API in length-aware order. Fields that are not listed go on to the engine."


def document(limits: Limits, *, keys: bool) -> bytes:
    """Return the OpenAPI document as JSON. ``keys`` states whether requests need an API key."""
    security: list[Json] = [{"key": []}] if keys else []
    components: Json = {"schemas": _schemas(limits)}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    name: Json = {"name": "model", "in": "path", "required": True, "schema": _STRING | {"minLength": 1}}
    gets = {
        "/v1/models": _operation("listModels", "Models", "400 401 429 431 503", security),
        "/v1/models/{model}": _operation("retrieveModel", "Model", "400 401 404 429 431 503", security)
        | {"parameters": [name]},
        "/health": _operation("health", "Status", "400 431", []),
        "/ready": _operation("ready", "Status", "400 431 503", []),
        "/openapi.json": _operation("openapi", "Object", "400 431", []),
    }
    paths = {"/v1/chat/completions": {"post": _completion("createChatCompletion", "Chat", security)}}
    paths["/v1/completions"] = {"post": _completion("createCompletion", "Completion", security)}
    paths |= {path: {"get": operation} for path, operation in gets.items()}
    info = {"title": "lengthwise gateway", "version": "1", "description": _DESCRIPTION}
    return msgspec.json.encode({"openapi": "3.1.0", "info": info, "paths": paths, "components": components})


def _completion(name: str, schema: str, security: list[Json]) -> Json:
    operation = _operation(name, "Object", " ".join(_ERRORS), security)
    answer = operation["responses"]["200"]
    answer["description"] = "The response, or its events"
    answer["content"]["text/event-stream"] = {}
    return operation | {"requestBody": {"required": True, "content": _json(schema)}}


def _operation(name: str, schema: str, errors: str, security: list[Json]) -> Json:
    responses: Json = {"200": {"description": "As requested", "headers": _REQUEST_ID, "content": _json(schema)}}
    retry = {"retry-after": {"schema": {"type": "integer", "minimum": 1}, "required": True}}
    for status in errors.split():
        headers = _REQUEST_ID | (retry if status in {"429", "503"} else {})
        responses[status] = {"description": _ERRORS[status], "headers": headers, "content": _json("Error")}
    return {"operationId": name, "security": security, "responses": responses}


def _json(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _object(properties: Json, required: tuple[str, ...] = ()) -> Json:
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _integer(minimum: int, maximum: int) -> Json:
    return {"type": ["integer", "null"], "minimum": minimum, "maximum": maximum}


def _schemas(limits: Limits) -> Json:
    texts = {"type": "array", "items": _STRING, "maxItems": MAX_STOPS}
    both: Json = {
        "model": _STRING | {"minLength": 1, "maxLength": MAX_NAME},
        "stream": {"type": ["boolean", "null"]},
        "n": _integer(1, limits.n),
        "max_tokens": _integer(1, limits.max_tokens),
        "stop": {"anyOf": [_TEXT, texts]},
        "prompt_logprobs": _integer(0, MAX_LOGPROBS),
        "user": _TEXT,
        "prompt_cache_key": _TEXT,
        "vllm_xargs": {"type": ["object", "null"], "propertyNames": {"not": {"pattern": f"^{HINTS}"}}},
    } | {name: {"enum": [None, 0]} if name == "priority" else {"type": "null"} for name in ENGINE_FIELDS}
    part = {"type": "object", "properties": {"type": _STRING, "text": _TEXT}}
    parts = {"type": "array", "items": {"anyOf": [_STRING, part]}}
    message = _object({"role": _STRING, "content": {"anyOf": [_TEXT, parts]}}, ("role",))
    chat = {
        "messages": {"type": "array", "items": message, "minItems": 1, "maxItems": limits.messages},
        "max_completion_tokens": _integer(1, limits.max_tokens),
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": _integer(0, MAX_LOGPROBS),
        **{name: {} for name in ("tools", "functions", "documents", "chat_template", "chat_template_kwargs")},
    }
    ids = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    many = {"type": "array", "minItems": 1, "maxItems": limits.messages}
    prompt = [_STRING, many | {"items": _STRING}, ids, many | {"items": ids}]
    own = {
        "prompt": {"anyOf": prompt},
        "suffix": {},
        "best_of": _integer(1, limits.n),
        "logprobs": _integer(0, MAX_LOGPROBS),
    }
    model = {"id": _STRING, "object": {"const": "model"}, "created": {"type": "integer"}, "owned_by": _STRING}
    models = {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}
    return {
        "Chat": _object(both | chat, ("model", "messages")),
        "Completion": _object(both | own, ("model", "prompt")),
        "Models": _object({"object": {"const": "list"}, "data": models}),
        "Model": _object(model | {"max_model_len": {"type": "integer"}}, tuple(model)),
        "Status": _object({"status": _STRING}),
        "Object": {"type": "object"},
        "Error": _object({"error": _object({"message": _STRING, "type": _STRING, "param": _TEXT, "code": _TEXT})}),
    }
