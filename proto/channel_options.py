"""gRPC options that both ends of every hop share: sizes, keepalive, limits, reconnecting.

One side alone is not enough for most of them: a message limit holds at sender and receiver, and a client that
pings more often than its server tolerates is thrown out.
"""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_METADATA_BYTES = 64 * 1024
# A peer that is frozen, or gone without a word, is noticed within so many seconds unless a process is told otherwise.
PEER_SILENCE_S = 2.5
# Of which so large a part passes before a ping asks; the rest waits for its answer, which a crowded machine delays.
_BEFORE_PING = 0.4
# Pings at least this far apart never count against a client.
MIN_PING_INTERVAL_MS = 500
MAX_PENDING_REQUESTS = 16_384
# gRPC cancels calls that a busy server has not taken up after 30 s by default; their callers have deadlines.
MAX_PENDING_S = 600
RECONNECT_MIN_MS = 100
# An attempt costs next to nothing, and a worker that is back is of no use before it.
RECONNECT_MAX_MS = 300
# How long one attempt to connect may take; gRPC core names this the minimum back-off.
CONNECT_TIMEOUT_MS = 3_000

ChannelOptions = tuple[tuple[str, int | str], ...]

_SHARED: ChannelOptions = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def channel_options(peer_silence_s: float = PEER_SILENCE_S) -> ChannelOptions:
    """Options of a client's channel."""
    return (
        *_SHARED,
        *_keepalive(peer_silence_s),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MIN_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
        ("grpc.enable_http_proxy", 0),
    )


def server_options(peer_silence_s: float = PEER_SILENCE_S) -> ChannelOptions:
    """Options of a server."""
    return (
        *_SHARED,
        *_keepalive(peer_silence_s),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server.max_pending_requests", MAX_PENDING_REQUESTS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_REQUESTS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
        ("grpc.so_reuseport", 0),
    )


def _keepalive(peer_silence_s: float) -> ChannelOptions:
    """A connection is given up when nothing came for so many seconds."""
    before_ping_ms = round(peer_silence_s * 1000 * _BEFORE_PING)
    after_ping_ms = round(peer_silence_s * 1000) - before_ping_ms
    return (
        ("grpc.keepalive_time_ms", before_ping_ms),
        ("grpc.keepalive_timeout_ms", after_ping_ms),
        # gRPC core waits for the answer to any ping, those of keepalive too, a minute unless it is told this as well.
        ("grpc.http2.ping_timeout_ms", after_ping_ms),
    )
