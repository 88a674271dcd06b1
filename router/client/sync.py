# Generated from aio.py by tools/blocking_client.py; do not edit.
"""The blocking client: a thin shell around requests.py, results.py and retry.py.

Owns sending, waiting and closing. Channels are in sync_channels.py.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import Self, Unpack

import grpc
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.router.client import requests
from blockyard.router.client.arguments import (
    ChatArguments,
    EmbedArguments,
    GenerateArguments,
    LookupArguments,
    Messages,
    PlacementArguments,
    PromptArguments,
)
from blockyard.router.client.connection import Connection, TlsOptions
from blockyard.router.client.errors import BlockyardError, from_rpc
from blockyard.router.client.requests import Call, GenerateCall, Response
from blockyard.router.client.results import Completion, Delta, Embedding, completion, embedding
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
from blockyard.router.client.sync_channels import Channels, Stream, collected, sleep


class Client:
    """Talks to one or more routers of a cluster. Safe to share among threads.

    There is one connection for each address. Several routers may share an address. The connection then leads to one of
    them, until that router fails. list_requests() and abort() see only what that router holds.

    Every call raises a BlockyardError (errors.py) if it fails, and ValueError or TypeError for arguments that cannot be
    sent.
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
        """Check the arguments; nothing is sent yet. Raises ValueError and TypeError.

        `token`: None takes BLOCKYARD_TOKEN, if it is set. Without `tls` a token may go to loopback addresses only,
        unless `allow_plaintext_token` is set. A new connection without a greeting is given up after `connect_seconds`.
        """
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
        self._channels = Channels(self._connection, self._config.addresses)

    def close(self) -> None:
        """End every connection and the calls on it."""
        self._channels.close()

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
        """Run a request to its end and return its whole result. The arguments are those of stream()."""
        deltas = collected(self.stream(prompt, timeout_seconds=timeout_seconds, **arguments))
        return completion(deltas)

    def stream(
        self,
        prompt: str | None = None,
        *,
        timeout_seconds: float | None = None,
        **arguments: Unpack[GenerateArguments],
    ) -> Stream[Delta]:
        """Run a request and yield its deltas as tokens are sampled. The last delta of each output has `finish`.

        The request is sent when the first delta is asked for. Closing the generator cancels the request. Raises
        LostTokensError if a token is missing.
        """
        call = requests.generate_stream(prompt, arguments)
        return self._deltas(call, Attempts(self._config, timeout_seconds))

    def embed(
        self,
        prompt: str | None = None,
        *,
        timeout_seconds: float | None = None,
        **arguments: Unpack[EmbedArguments],
    ) -> Embedding:
        """Return the embedding of a text. Raises InvalidRequestError (UNSUPPORTED) where the model generates.

        An instruction, where the model wants one, is a part of the text.
        """
        return embedding(self._unary(requests.embed(prompt, arguments), timeout_seconds))

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        **chat_arguments: Unpack[ChatArguments],
    ) -> list[int]:
        """Return the token ids that generate() would use for this prompt."""
        response = self._unary(requests.tokenize(prompt, messages, model, chat_arguments))
        return list(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        response = self._unary(requests.detokenize(token_ids, model))
        return response.text

    def list_models(self) -> list[inference_pb2.Model]:
        response = self._unary(requests.list_models())
        return list(response.models)

    def abort(self, request_id: str) -> None:
        """End a running request of this tenant. Raises NotFoundError if none of the routers asked holds it.

        It asks each address once. If several routers share an address, this client is connected to one of them, and a
        request of another client may be on another. That request is then not found. The client that started a request
        can always end it by closing its stream.
        """
        self._abort(requests.abort(request_id))

    def cluster_info(self) -> cluster_pb2.ClusterInfo:
        return self._unary(requests.cluster_info())

    def list_workers(self) -> list[cluster_pb2.Worker]:
        response = self._unary(requests.list_workers())
        return list(response.workers)

    def watch_workers(self, *, timeout_seconds: float | None = None) -> Stream[list[cluster_pb2.Worker]]:
        """Yield the list of all workers at once, and again after each change, until the generator is closed or time is
        up."""
        attempts = Attempts(self._config, timeout_seconds)
        with closing(self._responses(requests.watch_workers(), attempts)) as responses:
            for response in responses:
                yield list(response.workers)

    def block_pool(self, worker_id: str) -> cluster_pb2.BlockPool:
        return self._unary(requests.block_pool(worker_id))

    def list_blocks(self, worker_id: str, *, limit: int | None = None) -> list[cluster_pb2.Block]:
        """Return the first `limit` KV blocks of a worker, or all. Blocks may change between two pages that are read."""
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
        """Return the KV blocks of a worker with these numbers or names, at most 1000 of either."""
        response = self._unary(requests.find_blocks(worker_id, block_ids, names))
        return list(response.blocks)

    def list_sequences(self, worker_id: str) -> list[cluster_pb2.SequenceInfo]:
        """Return the sequences that run or wait on a worker, without their block tables."""
        sequences: list[cluster_pb2.SequenceInfo] = []
        page_token = ""
        while True:
            page = self._unary(requests.list_sequences(worker_id, page_token))
            sequences += page.sequences
            page_token = page.next_page_token
            if not page_token:
                return sequences

    def sequence(self, worker_id: str, sequence_id: int) -> cluster_pb2.SequenceInfo | None:
        """Return one sequence of a worker with its block table, or None if it has ended."""
        page = self._unary(requests.one_sequence(worker_id, sequence_id))
        return next(iter(page.sequences), None)

    def lookup_prefix(
        self, prompt: str | None = None, **arguments: Unpack[LookupArguments]
    ) -> cluster_pb2.LookupPrefixResponse:
        """Return how many leading KV blocks of a prompt each worker has cached, according to the index."""
        return self._unary(requests.lookup_prefix(prompt, arguments))

    def explain_placement(
        self, prompt: str | None = None, **arguments: Unpack[PlacementArguments]
    ) -> cluster_pb2.ExplainPlacementResponse:
        """Return on which worker a prompt would run now, and its estimated cost on each. Nothing runs."""
        return self._unary(requests.explain_placement(prompt, arguments))

    def index_info(self, model: str | None = None) -> cluster_pb2.IndexInfo:
        """Return the state and size of a model's prefix index as the answering router sees it. It counts the whole
        index. Without `model` it is the cluster's first one."""
        return self._unary(requests.index_info(model))

    def list_requests(self) -> list[cluster_pb2.RequestInfo]:
        """Return the requests that the answering router holds now. Other routers' requests are not listed."""
        response = self._unary(requests.list_requests())
        return list(response.requests)

    def drain_worker(
        self,
        worker_id: str,
        *,
        grace_seconds: float = 30.0,
        force: bool = False,
        timeout_seconds: float | None = None,
    ) -> int:
        """Stop sending new requests to a worker, and return once nothing runs there.

        Returns how many requests did not finish within the grace period and moved to other workers. The drain continues
        if this call ends early; resume_worker() undoes it. Draining the last worker that takes requests
        needs `force`, and raises InvalidRequestError (LAST_WORKER) without it.
        """
        wanted = grace_seconds + HAND_OVER_SECONDS if timeout_seconds is None else timeout_seconds
        response = self._unary(requests.drain_worker(worker_id, grace_seconds, force=force), wanted)
        return response.moved

    def resume_worker(self, worker_id: str) -> None:
        """Undo a drain: the worker takes new requests again."""
        self._unary(requests.resume_worker(worker_id))

    def flush_cache(self, worker_id: str | None = None) -> admin_pb2.FlushCacheResponse:
        """Evict every cached block that no running request holds, on one worker or on all. Returns how many were
        evicted."""
        return self._unary(requests.flush_cache(worker_id))

    def rebuild_index(self, worker_id: str | None = None) -> int:
        """Make one worker, or all, publish every cached block to the index again. Returns how many workers do so."""
        response = self._unary(requests.rebuild_index(worker_id))
        return response.workers

    def pull_prefix(
        self,
        worker_id: str,
        prompt: str | None = None,
        *,
        source_id: str | None = None,
        timeout_seconds: float | None = None,
        **arguments: Unpack[PromptArguments],
    ) -> admin_pb2.PullPrefixResponse:
        """Have a worker fetch a prompt's blocks from another one, although no request needs them. For admins.

        Without `source_id` the source is the worker that has most of them, by the index. Raises InvalidRequestError
        (PULL_IMPOSSIBLE) where there is nothing to fetch or no way, and UnavailableError (PULL_FAILED) where the pull
        broke off.
        """
        call = requests.pull_prefix(worker_id, prompt, source_id, arguments)
        return self._unary(call, timeout_seconds)

    def add_adapter(
        self,
        name: str,
        path: str,
        *,
        tenant: str = "",
        model: str | None = None,
        timeout_seconds: float | None = None,
    ) -> admin_pb2.Adapter:
        """Have all workers of a model read a LoRA adapter from its folder, and let requests use it by this name. For
        admins.

        Without `model` it is the default model's. A name that exists stands for the new content from then on. With a
        `tenant`, it exists for that tenant alone. Raises InvalidRequestError (ALREADY_EXISTS) for the name of a model,
        or of an adapter of another model.
        """
        call = requests.add_adapter(name, path, tenant, model)
        response = self._unary(call, timeout_seconds)
        return response.adapter

    def remove_adapter(self, name: str, *, model: str | None = None) -> None:
        """Forget the adapter of this name of a model, by default the first one. For admins.

        Requests that use it go on to their end.
        """
        self._unary(requests.remove_adapter(name, model))

    def list_adapters(self, *, model: str | None = None) -> list[admin_pb2.Adapter]:
        """Return the adapters of a model, by default the first one, ordered by name. For admins."""
        response = self._unary(requests.list_adapters(model))
        return list(response.adapters)

    def abort_any(self, request_id: str) -> None:
        """End the running requests with this id, of whatever tenant. For admins. Otherwise like abort()."""
        self._abort(requests.abort_any(request_id))

    def _deltas(self, call: GenerateCall, attempts: Attempts) -> Stream[Delta]:
        check = StreamCheck(call.num_outputs)
        with closing(self._responses(call, attempts)) as responses:
            for message in responses:
                yield check.delta(message)
        check.end()

    def _responses(self, call: Call[Response], attempts: Attempts) -> Stream[Response]:
        """Send a call and yield its stream's messages. It is retried only before the first one, so none is repeated."""
        while True:
            address, begun = self._rotation.current, False
            method = self._channels.to(address).unary_stream(
                call.path,
                request_serializer=requests.serialize,
                response_deserializer=call.response_type.FromString,
            )
            rpc = method(
                call.request,
                timeout=attempts.remaining_seconds(),
                metadata=self._connection.metadata,
                wait_for_ready=attempts.waits_for_connection,
            )
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

    def _send(self, address: str, call: Call[Response], attempts: Attempts) -> Response:
        method = self._channels.to(address).unary_unary(
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

    def _wait_after(self, failure: BlockyardError, address: str, attempts: Attempts) -> None:
        self._rotation.leave_after(failure, address)
        sleep(attempts.delay_after(failure))

    def _failure(self, error: grpc.RpcError, address: str, *, has_begun: bool = False) -> BlockyardError:
        return from_rpc(error, address, has_begun=has_begun, is_tls=self._connection.is_tls)
