"""The session's messages before drains, stalls and tenants existed: the version of an older worker or router."""

from typing import Any

from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2, session_pb2
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

NEW_FIELDS = {
    "Hello": {"is_draining", "stalled_seconds"},
    "Pong": {"stalled_seconds"},
    "Submit": {"tenant"},
    "ToRouter": {"draining"},
}
UNKNOWN = bytes((0xC2, 0x3E, 3)) + b"new"
"""Field 1000, which no message has: a text."""


def _old_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for module in (inference_pb2, cluster_pb2, admin_pb2, session_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        if module is session_pb2:
            del file.service[:]
            for message in file.message_type:
                kept = [
                    field for field in message.field if field.name not in NEW_FIELDS.get(message.name, ())
                ]
                del message.field[:]
                message.field.extend(kept)
        pool.Add(file)  # type: ignore[attr-defined]
    return pool


_POOL = _old_pool()


def old_class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"blockyard.v1.{name}"))


def as_old(message: Message) -> bytes:
    """Return the message as an older program would send it."""
    parsed = old_class(message.DESCRIPTOR.name).FromString(message.SerializeToString())
    parsed.DiscardUnknownFields()
    return bytes(parsed.SerializeToString())


def as_newer(message: Message) -> bytes:
    """Return the message as a newer program might send it: with unknown fields at every level."""
    copy = type(message).FromString(message.SerializeToString())
    _add_unknown(copy)
    return copy.SerializeToString()


def _add_unknown(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            _add_unknown(inner)
    message.MergeFromString(UNKNOWN)
