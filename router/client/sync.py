"""The blocking client: a thin shell round requests.py, results.py and retry.py."""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Self, Unpack

import grpc
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.router.client import requests
from blockyard.router.client.arguments import (
    ChatArguments,
    GenerateArguments,
    Messages,
    PlacementArguments,
    PromptArguments,
)
from blockyard.router.client.connection import Connection, TlsOptions
from blockyard.router.client.errors import BlockyardError, from_rpc
from blockyard.router.client.requests import Call, GenerateCall, Response
from blockyard.router.client.results import Completion, Delta, completion
from blockyard.router.client.retry import (
    DEFAULT_CONNECT_SECONDS,
    DEFAULT_TIMEOUT_SECONDS,
    HAND_OVER_SECONDS,
    AddressRotation,
    Attempts,
    ClientConfig,
    abort_failure,
)
from blockyard.router.client.stream_check import StreamCheck


class Client:
    """Talks to one or more routers of a cluster. Safe to share among threads.

    An address is one connection. Where routers share one it leads to one of them, the same until it fails: what only
    that one knows (list_requests, abort) is said of it alone.

    Every call raises a BlockyardError of errors.py where the cluster fails it, ValueError or TypeError for
    arguments that cannot be sent.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        retries: int = 3,
        token: str | None = None,
        tenant: str | None = None,
        tls: TlsOptions | None = None,
        allow_plaintext_token: bool = False,
        connect_seconds: float = DEFAULT_CONNECT_SECONDS,
    ) -> None:
        """`token`: None takes that of BLOCKYARD_TOKEN, if it is set. Without `tls` it is sent over loopback only,
        unless `allow_plaintext_token`. A new connection without a greeting is given up after `connect_seconds`. Raises
        ValueError, TypeError."""
        self._config = ClientConfig.of(addresses, timeout_seconds=timeout_seconds, retries=retries)
        self._rotation = AddressRotation(self._config.addresses)
        self._connection = Connection.of(
            self._config.addresses,
            token=token,
            tenant=tenant,
            tls=tls,
            allow_plaintext_token=allow_plaintext_token,
            connect_seconds=connect_seconds,
        )
        self._channels = {address: self._connection.channel(address) for address in self._config.addresses}

    def close(self) -> None:
        """Ends every connection, and the calls on them."""
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout_seconds: float | None = None,
        **arguments: Unpack[GenerateArguments],
    ) -> Completion:
        """Runs a request to its end."""
        return completion(list(self.stream(prompt, timeout_seconds=timeout_seconds, **arguments)))

    def stream(
        self,
        prompt: str | None = None,
        *,
        timeout_seconds: float | None = None,
        **arguments: Unpack[GenerateArguments],
    ) -> Generator[Delta, None, None]:
        """Deltas as they are sampled; the last of each output has `finish`. Closing the generator cancels the request.

        The request is sent when the first delta is asked for. Raises LostTokensError rather than skip a token.
        """
        call = requests.generate_stream(prompt, arguments)
        return self._deltas(call, Attempts(self._config, timeout_seconds))

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        **chat_arguments: Unpack[ChatArguments],
    ) -> list[int]:
        """Token ids exactly as generate() would have them."""
        return list(self._unary(requests.tokenize(prompt, messages, model, chat_arguments)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        return self._unary(requests.detokenize(token_ids, model)).text

    def list_models(self) -> list[inference_pb2.Model]:
        return list(self._unary(requests.list_models()).models)

    def abort(self, request_id: str) -> None:
        """Ends a running request. Asks each of the client's addresses, until one leads to the router that holds it;
        raises NotFoundError where none does.

        Routers that share a port stand behind one address, and this client is connected to one of them: a request that
        another client began there may be held by one of the others, and is then not found. Whoever began a request
        can always end it by closing its stream.
        """
        self._abort(requests.abort(request_id))

    def cluster_info(self) -> cluster_pb2.ClusterInfo:
        return self._unary(requests.cluster_info())

    def list_workers(self) -> list[cluster_pb2.Worker]:
        return list(self._unary(requests.list_workers()).workers)

    def watch_workers(
        self, *, timeout_seconds: float | None = None
    ) -> Generator[list[cluster_pb2.Worker], None, None]:
        """All workers at once, then again at each change, until closed or out of time."""
        attempts = Attempts(self._config, timeout_seconds)
        with closing(self._responses(requests.watch_workers(), attempts)) as responses:
            for response in responses:
                yield list(response.workers)

    def block_pool(self, worker_id: str) -> cluster_pb2.BlockPool:
        return self._unary(requests.block_pool(worker_id))

    def list_blocks(self, worker_id: str, *, limit: int | None = None) -> list[cluster_pb2.Block]:
        """List the blocks of a worker, the first `limit` or all. Pages are read one by one, and blocks may change
        between two of them."""
        blocks: list[cluster_pb2.Block] = []
        page_token = ""
        while True:
            page = self._unary(requests.list_blocks(worker_id, page_token))
            blocks += page.blocks
            page_token = page.next_page_token
            if not page_token or (limit is not None and len(blocks) >= limit):
                return blocks[:limit]

    def find_blocks(
        self, worker_id: str, *, block_ids: Sequence[int] = (), names: Sequence[bytes] = ()
    ) -> list[cluster_pb2.Block]:
        """Some blocks of a worker, by number or by name: at most 1000 of either."""
        return list((self._unary(requests.find_blocks(worker_id, block_ids, names))).blocks)

    def list_sequences(self, worker_id: str) -> list[cluster_pb2.SequenceInfo]:
        """What runs and waits on a worker, page by page, without block tables."""
        sequences: list[cluster_pb2.SequenceInfo] = []
        page_token = ""
        while True:
            page = self._unary(requests.list_sequences(worker_id, page_token))
            sequences += page.sequences
            page_token = page.next_page_token
            if not page_token:
                return sequences

    def sequence(self, worker_id: str, sequence_id: int) -> cluster_pb2.SequenceInfo | None:
        """One sequence with its block table; None once it is over."""
        page = self._unary(requests.one_sequence(worker_id, sequence_id))
        return next(iter(page.sequences), None)

    def lookup_prefix(
        self, prompt: str | None = None, **arguments: Unpack[PromptArguments]
    ) -> cluster_pb2.LookupPrefixResponse:
        """How many leading blocks of a prompt each worker caches."""
        return self._unary(requests.lookup_prefix(prompt, arguments))

    def explain_placement(
        self, prompt: str | None = None, **arguments: Unpack[PlacementArguments]
    ) -> cluster_pb2.ExplainPlacementResponse:
        """Where a prompt would run, and what each worker would cost."""
        return self._unary(requests.explain_placement(prompt, arguments))

    def index_info(self) -> cluster_pb2.IndexInfo:
        """The prefix index as the answering router sees it. Counts all of it: for operators."""
        return self._unary(requests.index_info())

    def list_requests(self) -> list[cluster_pb2.RequestInfo]:
        """The requests that the answering router holds now: not those of others, behind the same address or another."""
        return list(self._unary(requests.list_requests()).requests)

    def drain_worker(
        self,
        worker_id: str,
        *,
        grace_seconds: float = 30.0,
        force: bool = False,
        timeout_seconds: float | None = None,
    ) -> int:
        """A worker takes nothing new from now on. Returns once nothing runs there: how many requests had not finished
        within the grace, and go on elsewhere. The drain goes on if this call ends before; resume_worker takes it back.

        The last worker that takes requests is drained with `force` alone: InvalidRequestError (LAST_WORKER) otherwise.
        """
        wanted = grace_seconds + HAND_OVER_SECONDS if timeout_seconds is None else timeout_seconds
        return (self._unary(requests.drain_worker(worker_id, grace_seconds, force=force), wanted)).moved

    def resume_worker(self, worker_id: str) -> None:
        """Takes a drain back."""
        self._unary(requests.resume_worker(worker_id))

    def flush_cache(self, worker_id: str | None = None) -> admin_pb2.FlushCacheResponse:
        """A worker, or all, forget every cached block that no running request holds."""
        return self._unary(requests.flush_cache(worker_id))

    def rebuild_index(self, worker_id: str | None = None) -> int:
        """A worker, or all, tell the prefix index everything anew: how many do."""
        return (self._unary(requests.rebuild_index(worker_id))).workers

    def abort_any(self, request_id: str) -> None:
        """As `abort`, whosever request it is: for admins."""
        self._abort(requests.abort_any(request_id))

    def _deltas(self, call: GenerateCall, attempts: Attempts) -> Generator[Delta, None, None]:
        check = StreamCheck(call.num_outputs)
        with closing(self._responses(call, attempts)) as responses:
            for message in responses:
                yield check.delta(message)
        check.end()

    def _responses(self, call: Call[Response], attempts: Attempts) -> Generator[Response, None, None]:
        """A stream's messages. Retried until the first one: later a retry would repeat them."""
        while True:
            address, begun = self._rotation.current, False
            rpc = self._open(address, call, attempts)
            try:
                for response in rpc:
                    begun = True
                    yield response
                return
            except grpc.RpcError as error:
                failure = self._failure(error, address, has_begun=begun)
                if begun:
                    raise failure from None
            finally:
                rpc.cancel()
            self._wait_after(failure, address, attempts)

    def _abort(self, call: Call[inference_pb2.AbortResponse]) -> None:
        failures: list[BlockyardError] = []
        for address in self._config.addresses:
            try:
                self._send(address, call, Attempts(self._config, None))
                return
            except grpc.RpcError as error:
                failures.append(self._failure(error, address))
        raise abort_failure(failures)

    def _unary(self, call: Call[Response], timeout_seconds: float | None = None) -> Response:
        attempts = Attempts(self._config, timeout_seconds)
        while True:
            address = self._rotation.current
            try:
                return self._send(address, call, attempts)
            except grpc.RpcError as error:
                failure = self._failure(error, address)
            self._wait_after(failure, address, attempts)

    def _wait_after(self, failure: BlockyardError, address: str, attempts: Attempts) -> None:
        self._rotation.leave_after(failure, address)
        time.sleep(attempts.delay_after(failure))

    def _failure(self, error: grpc.RpcError, address: str, *, has_begun: bool = False) -> BlockyardError:
        return from_rpc(error, address, has_begun=has_begun, is_tls=self._connection.is_tls)

    def _open(self, address: str, call: Call[Response], attempts: Attempts) -> "grpc._CallIterator[Response]":
        method = self._channels[address].unary_stream(
            call.path,
            request_serializer=requests.serialize,
            response_deserializer=call.response_type.FromString,
        )
        return method(
            call.request,
            timeout=attempts.remaining_seconds(),
            metadata=self._connection.metadata,
            wait_for_ready=attempts.waits_for_connection,
        )

    def _send(self, address: str, call: Call[Response], attempts: Attempts) -> Response:
        method = self._channels[address].unary_unary(
            call.path,
            request_serializer=requests.serialize,
            response_deserializer=call.response_type.FromString,
        )
        return method(
            call.request,
            timeout=attempts.remaining_seconds(),
            metadata=self._connection.metadata,
            wait_for_ready=attempts.waits_for_connection,
        )
