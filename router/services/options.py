"""What a router's gRPC server bears: sizes of messages and metadata, silent clients, bursts. Options only.

gRPC bounds neither connections by address nor bytes by connection: what a call sends before its message is read, the
window of a stream bounds, and how many are read at once is in calls/intake.py.
"""

import resource
from collections.abc import Sequence

from blockyard.proto.limits import MAX_MESSAGE_BYTES

HANDSHAKE_SECONDS = 10
MAX_STREAMS = 4096
"""Well above max_requests, so that a burst is refused with advice rather than held."""
MAX_CONNECTIONS = 2048
"""Of each port. Beyond it new ones are closed at once."""
IDLE_SECONDS = 300
"""A connection without a call is ended after it; clients of gRPC connect again with their next call."""
MIN_MESSAGE_BYTES = 8 * 2**20
BESIDE_TEXT_BYTES = 2**20
"""Of a message, for schemas, biases, lists of tokens."""
SERVER_OPTIONS = (
    # As much as our client takes: log-probabilities of many outputs come in one answer.
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    # Between a soft and a hard limit gRPC rejects at random: they are one.
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    # A client that vanished without a word is noticed after 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The other sets TCP's own time-out, which a frozen client's kernel never trips: without this one it is 60 s.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Who connects and says nothing, or a byte a second, would keep his connection for two minutes.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
    ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
    # It would let a client that sends fast have up to 16 MiB on its way for each call, read or not. Without it that is
    # 64 KiB until the message is read, and then as much as the message has.
    ("grpc.http2.bdp_probe", 0),
    # Of one connection: what comes beyond it waits in the client.
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Of a burst that comes in one moment gRPC would end a part as CANCELLED: each is to be refused with advice.
    ("grpc.server.max_pending_requests", 4 * MAX_STREAMS),
    ("grpc.server.max_pending_requests_hard_limit", 8 * MAX_STREAMS),
)


def server_options(*, text_bytes: int) -> Sequence[tuple[str, int]]:
    """Of a router whose prompts have at most so many bytes of text."""
    return (
        *SERVER_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes(text_bytes)),
        ("grpc.max_allowed_incoming_connections", max_connections()),
    )


def max_message_bytes(text_bytes: int) -> int:
    """Whatever is larger cannot be a prompt; what is a little too long is still read and refused in words."""
    return min(max(text_bytes + BESIDE_TEXT_BYTES, MIN_MESSAGE_BYTES), MAX_MESSAGE_BYTES)


def max_connections() -> int:
    """Of each of the two ports: a process with few files keeps half of them for all else."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 4)
