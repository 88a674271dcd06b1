"""API reference as Markdown, from the comments in v1/*.proto. Pure, except for protoc.

Owns the form of services, messages and enums. Roles and error reasons are the router's, and tools/api_reference.py
joins them.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockyard.proto.generate import PROTOS, run_protoc
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

INTERNAL = "session.proto"
"""The protocol between routers and workers, which is not part of the API."""
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE, _INNER = 4, 5, 6, 2
"""Numbers of fields in descriptor.proto. A comment's path consists of them."""
Path_ = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One .proto file, with its comments by the descriptor paths of the elements."""

    file: FileDescriptorProto
    comments: Mapping[Path_, str]

    def comment(self, *path: int) -> str:
        return self.comments.get(path, "")


def sources() -> list[Source]:
    """Return the files of the public API. Raises RuntimeError if protoc fails."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "descriptors"
        run_protoc(f"--descriptor_set_out={target}", "--include_source_info")
        described = FileDescriptorSet.FromString(target.read_bytes())
    public = [name for name in PROTOS if name != INTERNAL]
    by_name = {Path(file.name).name: file for file in described.file}
    return [_source(by_name[name]) for name in public]


def uncommented(source: Source) -> list[str]:
    """List the services, methods and fields without a comment."""
    file, missing = source.file, []
    for number, service in enumerate(file.service):
        if not source.comment(_FILE_SERVICE, number):
            missing.append(service.name)
        missing += [
            f"{service.name}.{method.name}"
            for place, method in enumerate(service.method)
            if not source.comment(_FILE_SERVICE, number, _INNER, place)
        ]
    for number, message in enumerate(file.message_type):
        missing += [
            f"{message.name}.{field.name}"
            for place, field in enumerate(message.field)
            if not source.comment(_FILE_MESSAGE, number, _INNER, place)
        ]
    return missing


def reference(found: Sequence[Source], roles: Mapping[str, str]) -> str:
    """Return services, messages and enums of each file. `roles` maps a method's full path to its callers, in words."""
    parts: list[str] = []
    for source in found:
        parts += _services(source, roles)
        parts += _messages(source)
        parts += _enums(source)
    return "\n".join(parts)


def _services(source: Source, roles: Mapping[str, str]) -> Iterator[str]:
    for number, service in enumerate(source.file.service):
        full = f"{source.file.package}.{service.name}"
        yield from (f"## {service.name}", "", source.comment(_FILE_SERVICE, number), "")
        for place, method in enumerate(service.method):
            comment = source.comment(_FILE_SERVICE, number, _INNER, place)
            role = roles[f"/{full}/{method.name}"]
            yield f"- `{method.name}` ({role}{_messages_of(method)}): {comment}"
        yield ""


def _messages(source: Source) -> Iterator[str]:
    for number, message in enumerate(source.file.message_type):
        yield from (f"### {message.name}", "")
        if comment := source.comment(_FILE_MESSAGE, number):
            yield from (comment, "")
        if not message.field:
            yield from ("No fields.", "")
            continue
        for place, field in enumerate(message.field):
            comment = source.comment(_FILE_MESSAGE, number, _INNER, place)
            yield f"- `{field.name}` ({_type(message, field)}): {comment}"
        yield ""


def _enums(source: Source) -> Iterator[str]:
    for number, enum in enumerate(source.file.enum_type):
        yield from (f"### {enum.name}", "")
        for place, value in enumerate(enum.value):
            comment = source.comment(_FILE_ENUM, number, _INNER, place)
            yield f"- `{value.name}` = {value.number}: {comment or _default_comment(enum, place)}"
        yield ""


def _default_comment(enum: EnumDescriptorProto, place: int) -> str:
    return "Not said." if enum.value[place].number == 0 else ""


def _messages_of(method: MethodDescriptorProto) -> str:
    """Return what a method takes and gives, where its name does not say so."""
    taken, given = (name.rpartition(".")[2] for name in (method.input_type, method.output_type))
    told = "" if taken == f"{method.name}Request" else f"; takes {_link(method.input_type)}"
    if method.server_streaming or given != f"{method.name}Response":
        told += f"; gives {'a stream of ' if method.server_streaming else ''}{_link(method.output_type)}"
    return told


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entry = next(
        (nested for nested in message.nested_type if field.type_name.endswith("." + nested.name)), None
    )
    if entry is not None and entry.options.map_entry:
        key, value = entry.field
        return f"map of {_scalar(key)} to {_scalar(value)}"
    kind = _link(field.type_name) if field.type_name else _scalar(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"{kind}[]"
    if field.proto3_optional:
        return f"{kind}?"
    if field.HasField("oneof_index"):
        return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return kind


def _scalar(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _source(file: FileDescriptorProto) -> Source:
    comments = {
        tuple(location.path): _flowing(location.leading_comments or location.trailing_comments)
        for location in file.source_code_info.location
    }
    return Source(file=file, comments=comments)


def _flowing(comment: str) -> str:
    return re.sub(r"\s+", " ", comment).strip()
