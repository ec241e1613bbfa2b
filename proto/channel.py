"""Client side of a hop: channel with the shared options, TLS, bearer token."""

from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc import aio

from graftline.proto.channel_options import PEER_SILENCE_S, channel_options

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files. Without `root_ca` the system's authorities count; certificate and key are for mutual TLS."""

    root_ca: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.root_ca.read_bytes() if self.root_ca else None,
            private_key=self.private_key.read_bytes() if self.private_key else None,
            certificate_chain=self.certificate.read_bytes() if self.certificate else None,
        )


@dataclass(frozen=True, slots=True, repr=False)
class Access:
    """How a caller reaches a server. The token goes out with every call as `metadata=access.metadata`.

    Attributes:
        peer_silence_s: a connection whose other end gives no sign of life for so long is broken.
    """

    token: str | None = None
    tls: ClientTls | None = None
    peer_silence_s: float = PEER_SILENCE_S

    @property
    def metadata(self) -> Metadata:
        """Call metadata with the bearer token; empty without one."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


ANONYMOUS = Access()


def open_channel(target: str, access: Access = ANONYMOUS) -> aio.Channel:
    """An aio channel with the options every hop shares."""
    if access.tls is None:
        return aio.insecure_channel(target, options=channel_options(access.peer_silence_s))
    return aio.secure_channel(target, access.tls.credentials(), options=channel_options(access.peer_silence_s))


def open_sync_channel(target: str, access: Access = ANONYMOUS) -> grpc.Channel:
    """The same for blocking callers."""
    if access.tls is None:
        return grpc.insecure_channel(target, options=channel_options(access.peer_silence_s))
    return grpc.secure_channel(target, access.tls.credentials(), options=channel_options(access.peer_silence_s))
