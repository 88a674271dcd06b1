"""docs/api.md matches the protos and the router, and these describe every item."""

import pytest
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.router.errors import RouterError

from tools.api_reference import document
from tools.proto_reference import Source, sources, uncommented

from .rig import ROOT


@pytest.fixture(scope="module")
def found() -> list[Source]:
    return sources()


def test_the_committed_reference_is_what_would_be_generated() -> None:
    assert (ROOT / "docs/api.md").read_text(encoding="utf-8") == document(), (
        "python -m tools.api_reference writes it"
    )


def test_every_service_method_and_field_of_the_api_has_a_comment(found: list[Source]) -> None:
    assert {name for source in found for name in uncommented(source)} == set()


def test_the_reference_has_every_method_message_and_field_of_the_generated_code() -> None:
    made = document()
    for module in (inference_pb2, cluster_pb2, admin_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            assert all(f"\n- `{method.name}` (" in made for method in service.methods)
        for message in module.DESCRIPTOR.message_types_by_name.values():
            section = made.partition(f"\n### {message.name}\n")[2].partition("\n### ")[0]
            assert all(f"\n- `{field.name}` (" in section for field in message.fields), message.name


def test_every_reason_that_the_router_can_give_is_explained() -> None:
    rows = {
        line.split("`")[1]: line.partition("): ")[2].strip()
        for line in document().partition("## Errors")[2].splitlines()
        if line.startswith("- `")
    }
    of_grpc = [kind for kind in _all(RouterError) if kind.__module__ == RouterError.__module__]
    leaves = [kind for kind in of_grpc if not kind.__subclasses__()]
    assert {kind.reason for kind in leaves} <= rows.keys()
    assert all(rows.values())


def _all(kind: type[RouterError]) -> list[type[RouterError]]:
    return [found for child in kind.__subclasses__() for found in (child, *_all(child))]
