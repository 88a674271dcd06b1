"""Writes docs/api.md: `python -m tools.api_reference [--check]` from the project root.

Joins the protos' comments (tools/proto_reference.py) with roles and error reasons of the router. `--check` writes
nothing and fails where the committed file differs.
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from blockyard.router import errors
from blockyard.router.admission.auth import METHOD_ROLES, OPEN
from blockyard.router.errors import RouterError
from blockyard.router.services.grpc_status import ERROR_DOMAIN, code_of

from tools.proto_reference import reference, sources

TARGET = Path("docs/api.md")
HEAD = """# API reference

`python -m tools.api_reference` generates this page from the comments in `proto/v1/*.proto` and the router's code. Do
not edit it. [client.md](client.md) has the Python clients. [proto/README.md](../proto/README.md) has the rule by
which this API changes.

All services are of the package `blockyard.v1`, on one port, with server reflection and `grpc.health.v1`. A method's
line has the roles that may call it. Method `X` takes XRequest and gives XResponse, unless its line says otherwise. A
type with `[]` is repeated, and one with `?` is optional: a field that is absent stands for the server's default, never
for zero.

If the cluster has tokens, each call carries one as metadata `authorization: Bearer TOKEN`. The token's role must be
among those that may call the method. Without tokens every caller may call everything ([SECURITY.md](../SECURITY.md)).
The metadata `blockyard-tenant` names a tenant. Every call has a deadline: the caller's, or 600 s.
"""
ERRORS_HEAD = f"""## Errors

Every error is a `google.rpc.Status`. Its details hold a `google.rpc.ErrorInfo` of domain `{ERROR_DOMAIN}` with one of
the reasons below. A `BadRequest` names the fields that are wrong and what is allowed. A `RetryInfo` says when to retry,
and so does the trailing metadata `grpc-retry-pushback-ms`. Messages name fields, never their values.
"""


def document() -> str:
    return "\n".join([HEAD, reference(sources(), _roles()), ERRORS_HEAD, *_error_rows(), ""])


def _roles() -> dict[str, str]:
    return {
        method: "everybody" if roles is OPEN or roles is None else ", ".join(sorted(roles))
        for method, roles in METHOD_ROLES.items()
    }


def _error_rows() -> Iterator[str]:
    for kind in _kinds(RouterError):
        meaning = inspect.cleandoc(kind.__doc__ or "").replace("\n", " ")
        yield f"- `{kind.reason}` ({code_of(kind('')).name}): {meaning}"


def _kinds(parent: type[RouterError]) -> Iterator[type[RouterError]]:
    """Yield the errors that clients see, in the order of the tree. Classes that only group others are left out."""
    for kind in parent.__subclasses__():
        if kind.__module__ == errors.__name__:
            if "reason" in kind.__dict__ and kind not in (errors.NotFound, errors.Unavailable):
                yield kind
            yield from _kinds(kind)


def main() -> int:
    made = document()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(made, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == made:
        return 0
    print(f"{TARGET} is out of date, run `python -m tools.api_reference`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
