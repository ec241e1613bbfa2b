"""Options that several commands share."""

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from graftline.errors import InvalidRequestError
from graftline.proto.address import advertised_address, parse_address
from graftline.proto.channel import Access, ClientTls
from graftline.proto.channel_options import PEER_SILENCE_S
from graftline.proto.server import ServerTls
from graftline.tracing import Tracer, configured_endpoint, open_tracer

_NETWORK = "Network"
AUTO = "auto"
# No wait of ours is meant to be longer; much longer ones do not fit what gRPC and the system take.
MAX_SECONDS = 86_400.0
TOKEN_FILE_VARIABLE = "GRAFTLINE_TOKEN_FILE"


def token_or_file(token: str | None) -> str | None:
    """The token given, else what the file named by GRAFTLINE_TOKEN_FILE holds: secrets of containers are files.

    Raises:
        typer.BadParameter: the file cannot be read, or no token is in it or was given: nobody who asks for one may
            end up without.
    """
    path = os.environ.get(TOKEN_FILE_VARIABLE)
    if token is not None:
        return _sendable(token, "--token")
    if not path:
        return None
    try:
        found = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{TOKEN_FILE_VARIABLE}: {error}") from error
    return _sendable(found, f"{TOKEN_FILE_VARIABLE}: {path}")


def _sendable(token: str, source: str) -> str:
    """A token that fits a header of HTTP and gRPC. What is wrong is said without the token: it is a secret."""
    if not token:
        raise typer.BadParameter(f"{source} is empty")
    if not all("!" <= char <= "~" for char in token):
        raise typer.BadParameter(f"{source} has characters other than printable ASCII without spaces")
    return token


Listen = Annotated[str, typer.Option(help="host:port of gRPC; port 0: any free one.", rich_help_panel=_NETWORK)]
Advertise = Annotated[
    str | None,
    typer.Option(
        help="host or host:port that peers are told; auto: the address this host's name stands for.",
        rich_help_panel=_NETWORK,
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="GRAFTLINE_TOKEN",
        callback=token_or_file,
        help="Bearer token wanted of callers and shown to peers; GRAFTLINE_TOKEN_FILE names a file with it.",
        rich_help_panel=_NETWORK,
    ),
]
TlsCertificate = Annotated[Path | None, typer.Option(help="PEM: own certificate.", rich_help_panel=_NETWORK)]
TlsKey = Annotated[Path | None, typer.Option(help="PEM: own private key.", rich_help_panel=_NETWORK)]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="PEM: authority of peers; servers then want client certificates too.", rich_help_panel=_NETWORK),
]
DrainGrace = Annotated[
    float,
    typer.Option(min=0, max=MAX_SECONDS, help="Seconds for open requests after SIGTERM.", rich_help_panel=_NETWORK),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        help="http://host:port of an OTLP collector (gRPC) that spans go to; by default what OTEL_* variables name.",
        rich_help_panel=_NETWORK,
    ),
]


@contextmanager
def tracing(service: str, endpoint: str | None) -> Iterator[Tracer]:
    """A tracer for this process; what it still holds is sent when the block is left. Raises as `open_tracer`."""
    with closing(open_tracer(service, configured_endpoint(endpoint))) as tracer:
        yield tracer


def settled_advertise(advertise: str | None) -> str | None:
    """What peers are told, "auto" settled: containers and pods know their address only once they run.

    Raises:
        InvalidRequestError: this host's name stands for no address.
    """
    if advertise != AUTO:
        return advertise
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise InvalidRequestError("advertise", f"this host's name {name!r} has no address: {error}") from error


def settled_transfer_host(transfer_host: str, listen: str, advertise: str | None) -> str:
    """The host of a worker's transfer ports: by default the one that peers are told for gRPC.

    Args:
        advertise: as `settled_advertise` gives it.

    Raises:
        InvalidRequestError: it would be a wildcard.
    """
    if transfer_host:
        return transfer_host
    host, _ = parse_address(advertised_address(listen, 1, advertise), field="advertise")
    return host.strip("[]")


def server_tls(certificate: Path | None, key: Path | None, authority: Path | None) -> ServerTls | None:
    """TLS of a server, when there is a certificate.

    Raises:
        typer.BadParameter: a certificate without its key, or the other way round, or files that cannot be used.
    """
    if (certificate is None) != (key is None):
        raise typer.BadParameter("--tls-certificate and --tls-key go together")
    if certificate is None or key is None:
        return None
    _check_pem("--tls-certificate or --tls-key", lambda context: context.load_cert_chain(certificate, key, lambda: ""))
    return ServerTls(certificate, key, authority)


def _check_pem(options: str, load: Callable[[ssl.SSLContext], None]) -> None:
    """Whether files can be used, before gRPC finds out and says that it cannot bind a port."""
    try:
        load(ssl.create_default_context())
    except (OSError, ssl.SSLError) as error:
        raise typer.BadParameter(f"{options}: {error.strerror or error}") from error


def access(
    token: str | None,
    certificate: Path | None,
    key: Path | None,
    authority: Path | None,
    peer_silence_s: float = PEER_SILENCE_S,
) -> Access:
    """How this process reaches others.

    Raises:
        typer.BadParameter: the authority's file cannot be used.
    """
    if authority is not None:
        _check_pem("--tls-ca", lambda context: context.load_verify_locations(authority))
    tls = ClientTls(authority, certificate, key) if authority is not None else None
    return Access(token, tls, peer_silence_s)


def tokens(token: str | None) -> tuple[str, ...]:
    """Tokens a server accepts."""
    return (token,) if token else ()
