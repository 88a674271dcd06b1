"""A request may name its placement policy if its caller is an admin; over real gRPC."""

import json
from pathlib import Path

import grpc
import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.admission.token_entries import new_token
from blockyard.router.client import AsyncClient

from .rig import fields_of, reason_of, refused, request, running_router, worker_of_model

PROMPT = "def read_lines(path):"


async def test_a_request_is_placed_by_the_policy_that_it_names_and_the_next_by_the_routers_own() -> None:
    workers = [worker_of_model(name) for name in "abcd"]
    async with (
        running_router(policy="session") as router,
        router.workers(*workers),
        AsyncClient(router.address) as client,
    ):

        async def homes(**policy: str) -> list[str]:
            arguments = {"session_id": "one", **policy}
            answers = [await client.generate(PROMPT, max_tokens=1, **arguments) for _ in range(4)]
            return [answer.finish.worker_id for answer in answers]

        assert sorted(await homes(policy="round_robin")) == ["a", "b", "c", "d"]
        assert len(set(await homes())) == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["", "Prefix", "random"])
async def test_a_policy_that_does_not_exist_is_refused(name: str) -> None:
    async with running_router(no_worker_seconds=0.0) as router:
        error = await refused(router.inference.GenerateStream(request(policy=name)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields_of(error) == ["policy"]


async def test_where_clients_authenticate_only_an_admin_chooses_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    people = {role: new_token(role, role, "acme") for role in ("user", "admin")}
    path.touch(mode=0o600)
    path.write_text(json.dumps([entry for _, entry in people.values()]))
    async with running_router(auth_file=str(path)) as router, worker_of_model("a") as worker:
        router.server.set_workers([worker.address])
        metadata = {role: (("authorization", f"Bearer {token}"),) for role, (token, _) in people.items()}
        asked = request(policy="round_robin")
        error = await refused(router.inference.Generate(asked, metadata=metadata["user"]))
        assert reason_of(error) == "PERMISSION_DENIED"
        answer: inference_pb2.GenerateResponse = await router.inference.Generate(
            asked, metadata=metadata["admin"]
        )
        assert answer.finish.worker_id == "a"
