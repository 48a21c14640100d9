"""Protobuf messages of Envoy's external processing service v3 and of gRPC's health service.

The tables state numbers, names and types of the fields that the picker uses. Received fields that are missing here are
ignored. Maps are repeated entries, which have the same encoding.
"""

from __future__ import annotations

from typing import Any

from lengthwise.schema.errors import MissingExtraError

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, struct_pb2
except ImportError as error:
    raise MissingExtraError("the endpoint picker", "envoy") from error

_FILE, _PACKAGE = "lengthwise/ext_proc.proto", "lengthwise.ext_proc"
_ENUM = "int32"  # an enum and an int32 have the same encoding
_SCALARS = {"bool": 8, "string": 9, "bytes": 12, _ENUM: 5}
_WELL_KNOWN = {"Struct": ".google.protobuf.Struct", "Duration": ".google.protobuf.Duration"}
_REPEATED, _ONEOF = "*", "|"

# By message: number, name and type of each field. "*" marks a repeated field, "|" a member of the message's oneof.
_MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "HeaderValue": ((1, "key", "string"), (2, "value", "string"), (3, "raw_value", "bytes")),
    "HeaderMap": ((1, "headers", "HeaderValue*"),),
    "HeaderValueOption": ((1, "header", "HeaderValue"), (3, "append_action", _ENUM)),
    "HeaderMutation": ((1, "set_headers", "HeaderValueOption*"), (2, "remove_headers", "string*")),
    "MetadataEntry": ((1, "key", "string"), (2, "value", "Struct")),
    "Metadata": ((1, "filter_metadata", "MetadataEntry*"),),
    "HttpHeaders": ((1, "headers", "HeaderMap"), (3, "end_of_stream", "bool")),
    "HttpBody": ((1, "body", "bytes"), (2, "end_of_stream", "bool")),
    "HttpTrailers": ((1, "trailers", "HeaderMap"),),
    "ProtocolConfiguration": ((1, "request_body_mode", _ENUM), (2, "response_body_mode", _ENUM)),
    "ProcessingRequest": (
        (2, "request_headers", "HttpHeaders|"), (3, "response_headers", "HttpHeaders|"),
        (4, "request_body", "HttpBody|"), (5, "response_body", "HttpBody|"),
        (6, "request_trailers", "HttpTrailers|"), (7, "response_trailers", "HttpTrailers|"),
        (8, "metadata_context", "Metadata"), (9, "attributes", "MetadataEntry*"),
        (11, "protocol_config", "ProtocolConfiguration"),
    ),
    "StreamedBodyResponse": ((1, "body", "bytes"), (2, "end_of_stream", "bool")),
    "BodyMutation": ((1, "body", "bytes|"), (3, "streamed_response", "StreamedBodyResponse|")),
    "CommonResponse": (
        (2, "header_mutation", "HeaderMutation"), (3, "body_mutation", "BodyMutation"),
        (5, "clear_route_cache", "bool"),
    ),
    "PartResponse": ((1, "response", "CommonResponse"),),  # HeadersResponse and BodyResponse
    "TrailersResponse": ((1, "header_mutation", "HeaderMutation"),),
    "HttpStatus": ((1, "code", _ENUM),),
    "ImmediateResponse": (
        (1, "status", "HttpStatus"), (2, "headers", "HeaderMutation"), (3, "body", "bytes"), (5, "details", "string"),
    ),
    "ProcessingResponse": (
        (1, "request_headers", "PartResponse|"), (2, "response_headers", "PartResponse|"),
        (3, "request_body", "PartResponse|"), (4, "response_body", "PartResponse|"),
        (5, "request_trailers", "TrailersResponse|"), (6, "response_trailers", "TrailersResponse|"),
        (7, "immediate_response", "ImmediateResponse|"), (8, "dynamic_metadata", "Struct"),
        (10, "override_message_timeout", "Duration"),
    ),
    "HealthCheckRequest": ((1, "service", "string"),),
    "HealthCheckResponse": ((1, "status", _ENUM),),
}  # fmt: skip


def _classes() -> dict[str, Any]:
    """Return the classes of all messages, from a pool of their own: other packages may register Envoy's files."""
    file = descriptor_pb2.FileDescriptorProto(name=_FILE, package=_PACKAGE, syntax="proto3")
    pool = descriptor_pool.DescriptorPool()
    for known in (struct_pb2, duration_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
        file.dependency.append(known.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field_name, kind in fields:
            type_name = kind.rstrip(_REPEATED + _ONEOF)
            field = message.field.add(name=field_name, number=number, label=3 if kind.endswith(_REPEATED) else 1)
            field.type = _SCALARS.get(type_name, 11)
            if type_name not in _SCALARS:
                field.type_name = _WELL_KNOWN.get(type_name, f".{_PACKAGE}.{type_name}")
            if kind.endswith(_ONEOF):
                if not message.oneof_decl:
                    message.oneof_decl.add(name="kind")
                field.oneof_index = 0
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


_CLASSES = _classes()
ProcessingRequest, ProcessingResponse = _CLASSES["ProcessingRequest"], _CLASSES["ProcessingResponse"]
HealthCheckRequest, HealthCheckResponse = _CLASSES["HealthCheckRequest"], _CLASSES["HealthCheckResponse"]
HeaderMutation = _CLASSES["HeaderMutation"]
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)  # ProcessingMode.BodySendMode
BODY_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")
OVERWRITE = 2  # HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
