"""What a router's gRPC server bears: sizes of messages and metadata, silent clients, bursts. Options only."""

HANDSHAKE_SECONDS = 10
MAX_STREAMS = 4096
"""Well above max_requests, so that a burst is refused with advice rather than held."""
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
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
    # Of one connection: what comes beyond it waits in the client.
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Of a burst that comes in one moment gRPC would end a part as CANCELLED: each is to be refused with advice.
    ("grpc.server.max_pending_requests", 4 * MAX_STREAMS),
    ("grpc.server.max_pending_requests_hard_limit", 8 * MAX_STREAMS),
)
