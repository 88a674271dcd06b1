"""A real worker and a real router, each a process, for hostile input, and the invariants that hold after each input.

Owns the processes and the invariants. The tests own the input. All hostile input contains CANARY, which no answer may
repeat.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from blockyard.proto.security.cluster_identity import issue_identity
from blockyard.proto.security.peer_sockets import SESSION_NAME
from blockyard.proto.v1 import cluster_pb2, inference_pb2
from blockyard.proto.v1.cluster_pb2_grpc import ClusterServiceStub
from blockyard.proto.v1.inference_pb2_grpc import InferenceServiceStub
from google.rpc import error_details_pb2, status_pb2

MODEL = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
SECRET = "hush-of-the-hostile-tests"
CANARY = "kanarien vogel"
"""Canary that is no valid name, because of its space: audited calls may log a well-formed name."""
CONTEXT = 512
VOCABULARY = 4096
START_SECONDS = 120.0
CALL_SECONDS = 60.0
"""Ten times the bound on a refusal."""
MAX_DETAIL = 600
"""Maximum characters of an error's text: a few fields, each with what is allowed."""
GREEDY = {"temperature": 0.0, "max_tokens": 8}
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a call, as the client sees it."""

    code: grpc.StatusCode
    details: str = ""
    reason: str = ""
    fields: tuple[str, ...] = ()
    trailing: bytes = b""
    """Everything that came with the status, to search for an echo."""
    response: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One of our processes, with its log in a file."""

    popen: "subprocess.Popen[bytes]"
    address: str
    log: Path

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """A router and its worker."""

    router: Process
    worker: Process
    channel: grpc.Channel
    """Channel to the router."""
    worker_channel: grpc.Channel

    @property
    def inference(self) -> Any:
        return InferenceServiceStub(self.channel)

    @property
    def cluster(self) -> Any:
        return ClusterServiceStub(self.channel)

    def call(
        self,
        method: str,
        data: Any,
        *,
        streams: bool = False,
        metadata: Any = (),
        timeout: float = CALL_SECONDS,
        channel: grpc.Channel | None = None,
        **options: Any,
    ) -> Outcome:
        """Call "Service/Method" with raw bytes or a message. The response of a stream is its last message."""
        raw = data if isinstance(data, bytes) else data.SerializeToString()
        made = channel or self.channel
        call = (made.unary_stream if streams else made.unary_unary)(f"/blockyard.v1.{method}")
        try:
            if not streams:
                return Outcome(
                    grpc.StatusCode.OK, response=call(raw, timeout=timeout, metadata=metadata, **options)
                )
            messages = list(call(raw, timeout=timeout, metadata=metadata, **options))
            return Outcome(grpc.StatusCode.OK, response=messages[-1] if messages else None)
        except grpc.RpcError as error:
            return outcome_of(error)

    def tokens(self, prompt: str = "def f(x):", **sampling: Any) -> list[int]:
        request = inference_pb2.GenerateRequest(prompt=prompt, sampling={**GREEDY, **sampling})
        return list(self.inference.Generate(request, timeout=60).token_ids)

    def pool(self) -> cluster_pb2.BlockPool:
        worker_id = (
            self.cluster.ListWorkers(cluster_pb2.ListWorkersRequest(), timeout=10).workers[0].worker_id
        )
        return self.cluster.GetBlockPool(cluster_pb2.GetBlockPoolRequest(worker_id=worker_id), timeout=10)

    def check(self) -> None:
        """Check what must hold after any input."""
        assert self.router.is_alive, "the router has died"
        assert self.worker.is_alive, "the worker has died"
        assert len(self.tokens()) == GREEDY["max_tokens"]
        until(self._is_quiet)
        pool = self.pool()
        assert pool.free_blocks + pool.cached_blocks + pool.used_blocks == pool.total_blocks

    def check_logs(self) -> None:
        for process in (self.router, self.worker):
            log = process.log.read_text(errors="replace")
            for never in (CANARY, SECRET, "Traceback"):
                at = log.find(never)
                assert at < 0, f"{process.log.name} has {never!r}: {log[max(0, at - 1_000) : at + 3_000]}"

    def _is_quiet(self) -> bool:
        listed = self.cluster.ListRequests(cluster_pb2.ListRequestsRequest(), timeout=10)
        return not listed.requests and self.pool().used_blocks == 0


def outcome_of(error: Any) -> Outcome:
    trailing: dict[str, Any] = dict(error.trailing_metadata() or ())
    packed = trailing.get("grpc-status-details-bin", b"")
    reason, fields = "", []
    for detail in status_pb2.Status.FromString(packed).details:
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad_request):
            fields += [violation.field for violation in bad_request.field_violations]
    everything = repr(sorted(trailing.items())).encode() + packed
    return Outcome(error.code(), error.details() or "", reason, tuple(fields), everything)


def assert_discreet(outcome: Outcome) -> None:
    """Check that nothing of the input comes back, nor anything of our insides."""
    told = outcome.details.encode() + outcome.trailing
    assert CANARY.encode() not in told, told[:200]
    assert len(outcome.details) <= MAX_DETAIL, outcome.details
    assert not re.search(rb"Traceback|\.py\b|Exception|\w+Error\b|/work|/home|/tmp", told), told


def until(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)


def session_channel(address: str, secret: str) -> grpc.Channel:
    """Open a channel to a worker, as a peer that knows this secret."""
    own = issue_identity(secret, "default", dns_name=SESSION_NAME)
    credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    named = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", SESSION_NAME))
    return grpc.secure_channel(address, credentials, options=named)


@contextmanager
def running(
    module: str, arguments: list[str], *, log: Path, says: str, environment: dict[str, str] | None = None
) -> Iterator[Process]:
    """Start `python -m MODULE`, and return once its log says where it serves."""
    with log.open("wb") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, "BLOCKYARD_CLUSTER_SECRET": SECRET, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        found: list[str] = []

        def serves() -> bool:
            assert popen.poll() is None, log.read_text(errors="replace")
            found[:] = re.findall(says, log.read_text(errors="replace"))
            return bool(found)

        until(serves, START_SECONDS)
        yield Process(popen=popen, address=found[0], log=log)
    finally:
        popen.terminate()
        try:
            popen.wait(20)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


@contextmanager
def running_house(
    folder: Path, *, engine: tuple[str, ...] = ("--deterministic",), router: tuple[str, ...] = ()
) -> Iterator[House]:
    model = ["--model", str(MODEL)]
    sizes = ["--device", "cpu", "--kv-cache-memory", str(18 * 2**20), "--max-model-len", str(CONTEXT)]
    with ExitStack() as stack:
        worker = stack.enter_context(
            running(
                "blockyard.worker",
                [*model, *sizes, "--metrics-port", "-1", *engine],
                log=folder / "worker.log",
                says=r"worker \S+ serves at (\S+)",
            )
        )
        front = stack.enter_context(
            running(
                "blockyard.router",
                [*model, "--worker", worker.address, "--grace-seconds", "0", *router],
                log=folder / "router.log",
                says=r"router serving \S+ on (\S+)",
            )
        )
        channel = stack.enter_context(grpc.insecure_channel(front.address, options=CHANNEL_OPTIONS))
        worker_channel = stack.enter_context(session_channel(worker.address, SECRET))
        house = House(router=front, worker=worker, channel=channel, worker_channel=worker_channel)
        house.tokens()
        yield house
