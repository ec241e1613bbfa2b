"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from graftline.proto.channel import Access, ClientTls
from graftline.proto.server import ServerTls

_NETWORK = "Network"

Listen = Annotated[str, typer.Option(help="host:port of gRPC; port 0: any free one.", rich_help_panel=_NETWORK)]
Advertise = Annotated[str | None, typer.Option(help="host or host:port that peers are told.", rich_help_panel=_NETWORK)]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="GRAFTLINE_TOKEN", help="Bearer token wanted of callers and shown to peers.", rich_help_panel=_NETWORK
    ),
]
TlsCertificate = Annotated[Path | None, typer.Option(help="PEM: own certificate.", rich_help_panel=_NETWORK)]
TlsKey = Annotated[Path | None, typer.Option(help="PEM: own private key.", rich_help_panel=_NETWORK)]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="PEM: authority of peers; servers then want client certificates too.", rich_help_panel=_NETWORK),
]
DrainGrace = Annotated[
    float, typer.Option(min=0, help="Seconds for open requests after SIGTERM.", rich_help_panel=_NETWORK)
]


def server_tls(certificate: Path | None, key: Path | None, authority: Path | None) -> ServerTls | None:
    """TLS of a server, when there is a certificate.

    Raises:
        typer.BadParameter: a certificate without its key, or the other way round.
    """
    if (certificate is None) != (key is None):
        raise typer.BadParameter("--tls-certificate and --tls-key go together")
    if certificate is None or key is None:
        return None
    return ServerTls(certificate, key, authority)


def access(token: str | None, certificate: Path | None, key: Path | None, authority: Path | None) -> Access:
    """How this process identifies itself to others."""
    tls = ClientTls(authority, certificate, key) if authority is not None else None
    return Access(token, tls)


def tokens(token: str | None) -> tuple[str, ...]:
    """Tokens a server accepts."""
    return (token,) if token else ()
