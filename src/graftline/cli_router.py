"""`graftline router` and `graftline drain`."""

import asyncio
import logging
import resource
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from graftline import cli_options as shared
from graftline.errors import InvalidRequestError
from graftline.garbage import keep_what_is_there
from graftline.proto.address import is_wildcard, parse_address
from graftline.proto.channel import Access, open_channel
from graftline.proto.v1 import worker_pb2
from graftline.proto.v1.worker_pb2_grpc import WorkerServiceStub
from graftline.router.config import HealthConfig, Objectives, PolicyName, RequestConfig, RouterConfig, WorkerLists
from graftline.worker.process import announce_ready, die_with_launcher, is_launched, set_up_logging, stop_signals

if TYPE_CHECKING:
    from graftline.router.server import Router

logger = logging.getLogger(__name__)

app = typer.Typer()

MAX_OPEN_FILES = 65_536
# For the workers that a launcher started before its router.
PAIR_TIMEOUT_S = 60.0

Workers = Annotated[list[str] | None, typer.Option(help="host:port, or dns:host:port for every address of a name.")]

_REQUESTS = RequestConfig()
_HEALTH = HealthConfig()


@app.command()
def router(
    prefill: Workers = None,
    decode: Workers = None,
    workers_file: Annotated[
        Path | None, typer.Option(help="JSON or TOML with lists prefill and decode; read again when it changes.")
    ] = None,
    policy: Annotated[PolicyName, typer.Option(help="How workers are picked.")] = PolicyName.LEAST_LOADED,
    listen: shared.Listen = "127.0.0.1:7000",
    http_listen: Annotated[
        str, typer.Option(help="host:port of OpenAI HTTP, health and metrics; empty: none.")
    ] = "127.0.0.1:8000",
    advertise: shared.Advertise = None,
    max_open_requests: Annotated[int, typer.Option(min=1, help="More are refused with a retry hint.")] = 8192,
    default_max_tokens: Annotated[
        int, typer.Option(min=0, help="Output tokens when the client names none; 0: what the context leaves.")
    ] = 0,
    max_attempts: Annotated[int, typer.Option(min=1, help="Failed tries of one choice.")] = _REQUESTS.max_attempts,
    objective_first_token_s: Annotated[
        float,
        typer.Option(
            min=0, max=shared.MAX_SECONDS, help="Goodput counts requests whose first token came within this time,"
        ),
    ] = Objectives().first_token_s,
    objective_per_token_s: Annotated[
        float,
        typer.Option(min=0, max=shared.MAX_SECONDS, help="and whose later tokens took no longer than this on average."),
    ] = Objectives().per_token_s,
    hang_timeout_s: Annotated[
        float,
        typer.Option(min=0.6, max=shared.MAX_SECONDS, help="Silence after which a worker, or a caller, is given up."),
    ] = _HEALTH.hang_timeout_s,
    stall_timeout_s: Annotated[
        float,
        typer.Option(
            min=0.6,
            max=shared.MAX_SECONDS,
            help="A worker without progress for so long, with work at hand, is given up.",
        ),
    ] = _HEALTH.stall_timeout_s,
    max_requests_per_s: Annotated[
        float, typer.Option(min=0, help="More are refused with a retry hint; 0: no limit.")
    ] = 0.0,
    drain_grace_s: shared.DrainGrace = 30.0,
    token: shared.Token = None,
    tls_certificate: shared.TlsCertificate = None,
    tls_key: shared.TlsKey = None,
    tls_ca: shared.TlsCa = None,
    otlp_endpoint: shared.OtlpEndpoint = None,
    answers_sglang: Annotated[
        bool, typer.Option("--sglang", help="Answer SGLang's gateways too (sglang.grpc.scheduler.SglangScheduler).")
    ] = False,
    sglang_tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory from which they load the tokenizer; the router writes what is missing."),
    ] = None,
) -> None:
    """Run a router."""
    die_with_launcher()
    set_up_logging("router")
    if not (prefill or decode or workers_file):
        raise InvalidRequestError("prefill", "no workers: give --prefill and --decode, or --workers-file")
    config = RouterConfig(
        listen=listen,
        http_listen=http_listen or None,
        advertise=told_address(listen, advertise),
        workers=WorkerLists(tuple(prefill or ()), tuple(decode or ())),
        workers_file=workers_file,
        policy=policy,
        health=HealthConfig(hang_timeout_s=hang_timeout_s, stall_timeout_s=stall_timeout_s),
        requests=RequestConfig(
            max_open_requests=max_open_requests,
            max_requests_per_s=max_requests_per_s or None,
            default_max_tokens=default_max_tokens or None,
            max_attempts=max_attempts,
            objectives=Objectives(objective_first_token_s, objective_per_token_s),
        ),
        worker_access=shared.access(token, tls_certificate, tls_key, tls_ca, hang_timeout_s),
        tls=shared.server_tls(tls_certificate, tls_key, tls_ca),
        tokens=shared.tokens(token),
        drain_grace_s=drain_grace_s,
        answers_sglang=answers_sglang,
        sglang_tokenizer_dir=sglang_tokenizer,
    )
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise_file_limit()
    with (
        shared.tracing("graftline-router", otlp_endpoint) as tracer,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(replace(config, tracer=tracer)))


def raise_file_limit() -> None:
    """As many open files as the system allows, up to a bound: a client holds one, and shells begin with 1024, far below
    --max-open-requests.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # such as a kernel that allows less than its hard limit says
            logger.warning("no more than %d files and connections may be open: %s", soft, error)


def told_address(listen: str, advertise: str | None) -> str | None:
    """What a router says of itself once it is ready.

    Nobody dials it by that, unlike a worker: where it listens on every interface, this host's name will do.
    """
    host, _ = parse_address(listen, field="listen")
    if advertise is None and is_wildcard(host):
        return socket.gethostname()
    return shared.settled_advertise(advertise)


async def _serve(config: RouterConfig) -> None:
    from graftline.router.server import running_router

    with stop_signals() as stop:
        async with running_router(config) as running:
            if is_launched():
                await _wait_for_a_pair(running)
            keep_what_is_there()
            announce_ready(address=running.address, http=running.http_address)
            await stop.wait()


async def _wait_for_a_pair(running: "Router") -> None:
    """Gives workers that start beside this router their time. Without them it serves all the same, and says so."""
    try:
        await running.wait_until_usable(PAIR_TIMEOUT_S)
    except TimeoutError:
        logger.warning("no pair of workers is usable yet: %s", running.registry.why_no_pair())


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="host:port of a prefill or decode.")],
    grace_s: Annotated[
        float, typer.Option(min=0, max=shared.MAX_SECONDS, help="Seconds until what still runs is cancelled.")
    ] = 60.0,
    token: shared.Token = None,
    tls_certificate: shared.TlsCertificate = None,
    tls_key: shared.TlsKey = None,
    tls_ca: shared.TlsCa = None,
) -> None:
    """Take a worker out of service: it admits nothing new; returns when nothing is open there any more."""
    asyncio.run(_drain(worker, grace_s, shared.access(token, tls_certificate, tls_key, tls_ca)))
    typer.echo(f"{worker} is drained")


async def _drain(worker: str, grace_s: float, access: Access) -> None:
    import grpc

    from graftline.proto.status import error_from_rpc

    async with open_channel(worker, access) as channel:
        try:
            await WorkerServiceStub(channel).Drain(
                worker_pb2.DrainRequest(grace_s=grace_s), timeout=grace_s + 60.0, metadata=access.metadata
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
