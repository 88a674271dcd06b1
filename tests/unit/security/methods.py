"""Every method that a server names by reflection, so that a test of all methods cannot miss a new one."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

SECONDS = 5.0


async def all_methods(channel: grpc.aio.Channel, metadata: Any) -> list[descriptor_pb2.MethodDescriptorProto]:
    """Return the methods of every service that the server itself names. `name` holds the full path."""
    listed = await _reflected(channel, metadata, list_services="")
    methods = []
    for service in listed.list_services_response.service:
        answer = await _reflected(channel, metadata, file_containing_symbol=service.name)
        for packed in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(packed)
            for described in file.service:
                if f"{file.package}.{described.name}" == service.name:
                    for method in described.method:
                        method.name = f"/{service.name}/{method.name}"
                        methods.append(method)
    return methods


async def _reflected(channel: grpc.aio.Channel, metadata: Any, **request: Any) -> Any:
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(**request)

    stub = ServerReflectionStub(channel)
    return await anext(aiter(stub.ServerReflectionInfo(ask(), metadata=metadata, timeout=SECONDS)))


def message_class(type_name: str) -> type[Message]:
    """Return the class of a method's input or output, as its descriptor names it."""
    return GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(type_name.removeprefix(".")))
