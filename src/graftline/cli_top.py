"""`graftline top`: pools, pairs, accept length and traffic of a router, live or once."""

import asyncio
import ssl
import time
import urllib.request
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import grpc
import msgspec
import typer
from grpc import aio
from rich.console import Console
from rich.live import Live

from graftline import cli_options as shared
from graftline.errors import GraftlineError
from graftline.proto.channel import Access, ClientTls, open_channel
from graftline.proto.status import error_from_rpc
from graftline.proto.v1.router_pb2 import GetStatusRequest
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub
from graftline.top_sample import Counts, Look, Traffic
from graftline.top_view import view

if TYPE_CHECKING:
    from graftline.proto.v1.router_pb2_grpc import RouterServiceAsyncStub

app = typer.Typer()

ANSWER_TIMEOUT_S = 5.0


@app.command()
def top(
    router: Annotated[str, typer.Option(help="host:port of the router's gRPC.")] = "127.0.0.1:7000",
    http: Annotated[
        str, typer.Option(help="host:port of its HTTP, for traffic from /metrics; empty: leave that out.")
    ] = "127.0.0.1:8000",
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once; traffic is that since the router started.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of tables.")] = False,
    token: shared.Token = None,
    tls_certificate: shared.TlsCertificate = None,
    tls_key: shared.TlsKey = None,
    tls_ca: shared.TlsCa = None,
) -> None:
    """Show pools, pairs, queues, accept length and traffic of a running router, until Ctrl-C."""
    access = shared.access(token, tls_certificate, tls_key, tls_ca)
    scheme = "https" if tls_ca is not None else "http"
    source = _Router(router, access, f"{scheme}://{http}/metrics" if http else "")
    try:
        asyncio.run(_once(source, json) if once else _live(source, json, interval_s))
    except KeyboardInterrupt:
        raise typer.Exit from None


class _Router:
    """A router that is looked at again and again."""

    def __init__(self, address: str, access: Access, metrics_url: str) -> None:
        self._address = address
        self._access = access
        self._metrics_url = metrics_url
        self._before: Counts | None = None
        self._before_s = 0.0

    async def look(self, stub: "RouterServiceAsyncStub") -> Look:
        """Raises GraftlineError when the router does not answer."""
        try:
            status = await stub.GetStatus(GetStatusRequest(), timeout=ANSWER_TIMEOUT_S, metadata=self._access.metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        if not self._metrics_url:
            return Look.of(self._address, status, None, "traffic: not asked for")
        try:
            exposition = await asyncio.to_thread(_fetch, self._metrics_url, self._access.tls)
            return Look.of(self._address, status, self._traffic(Counts.of(exposition)))
        except (OSError, ValueError) as error:
            return Look.of(self._address, status, None, f"traffic: {self._metrics_url}: {error}")

    def open(self) -> aio.Channel:
        """A channel to it."""
        return open_channel(self._address, self._access)

    def lost(self, error: GraftlineError) -> Look:
        """What there is to see of a router that does not answer."""
        return Look(self._address, 0, (), (), None, f"no answer: {error}")

    def _traffic(self, counts: Counts) -> Traffic:
        now_s = time.monotonic()
        seconds = None if self._before is None else now_s - self._before_s
        traffic = Traffic.between(self._before, counts, seconds)
        self._before, self._before_s = counts, now_s
        return traffic


async def _once(router: _Router, as_json: bool) -> None:
    async with router.open() as channel:
        look = await router.look(RouterServiceStub(channel))
    if as_json:
        _print_json(look)
        return
    console = Console()
    # A pipe has no width of its own.
    (console if console.is_terminal else Console(width=120)).print(view(look))


async def _live(router: _Router, as_json: bool, interval_s: float) -> None:
    """Until cancelled; a router that is away may come back."""
    async with router.open() as channel:
        stub = RouterServiceStub(channel)
        with nullcontext() if as_json else Live(auto_refresh=False, screen=True) as live:
            while True:
                try:
                    look = await router.look(stub)
                except GraftlineError as error:
                    look = router.lost(error)
                if live is None:
                    _print_json(look)
                else:
                    live.update(view(look), refresh=True)
                await asyncio.sleep(interval_s)


def _print_json(look: Look) -> None:
    typer.echo(msgspec.json.encode(look))


def _fetch(url: str, tls: ClientTls | None) -> str:
    """Raises OSError (URLError is one)."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.root_ca)
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.private_key)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    with urllib.request.build_opener(*handlers).open(url, timeout=ANSWER_TIMEOUT_S) as answered:
        return str(answered.read().decode())
