"""gRPC server options: sizes of messages and metadata, silent clients, and bursts.

gRPC bounds neither connections by address nor bytes by connection. What a call sends before its message is read is
bounded by the window of its stream. calls/intake.py bounds how many messages are read at once.
"""

import resource
from collections.abc import Sequence

from blockyard.proto.limits import MAX_MESSAGE_BYTES, MAX_RESPONSE_BYTES

HANDSHAKE_SECONDS = 10
MAX_STREAMS = 4096
"""Well above max_requests, so that a burst is refused with a retry delay instead of held."""
MAX_CONNECTIONS = 2048
"""Most connections per port. Further ones are closed at once."""
IDLE_SECONDS = 300
"""A connection without a call for this long is closed. gRPC clients connect again with their next call."""
MIN_MESSAGE_BYTES = 8 * 2**20
BESIDE_TEXT_BYTES = 2**20
"""Room in a message for schemas, biases and lists of tokens, beside the prompt's text."""
SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    # Between a soft and a hard limit gRPC rejects at random, so both are equal.
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    # A client that vanished silently is noticed after 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The option above sets TCP's own timeout, which a frozen client's kernel never triggers. Without this one it takes
    # 60 s.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A client that connects and sends nothing, or a byte a second, would keep its connection for two minutes.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
    ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
    # With it a fast client could send up to 16 MiB per call before it is read. Without it that is 64 KiB until the
    # message is read, and then the size of the message.
    ("grpc.http2.bdp_probe", 0),
    # Per connection. Further streams wait in the client.
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Beyond these limits gRPC ends part of a burst as CANCELLED. Each request must be refused with a retry delay
    # instead.
    ("grpc.server.max_pending_requests", 4 * MAX_STREAMS),
    ("grpc.server.max_pending_requests_hard_limit", 8 * MAX_STREAMS),
)


def server_options(*, text_bytes: int) -> Sequence[tuple[str, int]]:
    """Return the server options of a router whose prompts have at most `text_bytes` bytes."""
    return (
        *SERVER_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes(text_bytes)),
        ("grpc.max_allowed_incoming_connections", max_connections()),
    )


def max_message_bytes(text_bytes: int) -> int:
    """Return the size of the largest message to read. A prompt that is a little too long still fits, for a clear
    refusal."""
    return min(max(text_bytes + BESIDE_TEXT_BYTES, MIN_MESSAGE_BYTES), MAX_MESSAGE_BYTES)


def max_connections() -> int:
    """Return the most connections per port. With two ports, half of the process's file descriptors stay free for
    others."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 4)
