"""Starts and stops a router: registry, gRPC, HTTP. Tests and the command line use the same context manager."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from graftline.errors import InvalidRequestError
from graftline.metrics import Metrics, ProcessRole
from graftline.proto.server import RpcServer
from graftline.proto.v1.router_pb2_grpc import add_RouterServiceServicer_to_server
from graftline.router.admission import Admission, RateLimit
from graftline.router.config import RouterConfig
from graftline.router.generation import Generator
from graftline.router.http_app import HttpApp
from graftline.router.http_server import running_http
from graftline.router.model import ModelStore
from graftline.router.pair_search import Fleet
from graftline.router.pairing import Pairing
from graftline.router.policy import make_policies
from graftline.router.registry import Registry
from graftline.router.service import RouterService
from graftline.router.sources import FileSource, ListSource, WorkerSource

SERVICE_NAME = "graftline.v1.RouterService"

# For callers to take the error of a request that outlived the drain, before connections are cut.
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class Router:
    """A running router.

    Attributes:
        address: host:port of gRPC.
        http_address: host:port of HTTP, None without it.
    """

    address: str
    http_address: str | None
    registry: Registry
    generator: Generator
    admission: Admission
    metrics: Metrics
    rpc: RpcServer

    async def wait_until_usable(self, timeout_s: float) -> None:
        """Until some pair may serve requests.

        Raises:
            TimeoutError: none did in time.
        """
        async with asyncio.timeout(timeout_s):
            while not self.registry.has_pair():
                await self.registry.wait_for_change()

    async def drain(self) -> None:
        """Refuses new requests and says so in health; open ones go on."""
        self.admission.is_draining = True
        await self.rpc.set_serving(False)


@asynccontextmanager
async def running_router(config: RouterConfig) -> AsyncIterator[Router]:
    """Runs a router for as long as the block is open; then drains it for `config.drain_grace_s` seconds.

    Raises:
        InvalidRequestError: an address in the config is bad.
        PeerUnavailableError: a port cannot be opened.
    """
    metrics = Metrics(ProcessRole.ROUTER)
    pairing = Pairing(make_policies(config.policy))
    async with AsyncExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(config.tokenizer_threads, "graftline-tokenizer"))
        sources: list[WorkerSource] = [ListSource(config.workers)]
        if config.workers_file is not None:
            sources.append(FileSource(config.workers_file))
        registry = Registry(
            sources,
            ModelStore(executor),
            config.health,
            config.worker_access,
            metrics,
            discovery_interval_s=config.discovery_interval_s,
            forget=pairing.forget,
        )
        rate = config.requests.max_requests_per_s
        admission = Admission(
            config.requests.max_open_requests, config.requests.retry_after_s, None if rate is None else RateLimit(rate)
        )
        fleet = Fleet(registry, pairing, config.requests, config.tracer)
        generator = Generator(fleet, admission, executor, metrics)
        rpc = RpcServer(
            config.listen,
            advertise=config.advertise,
            tls=config.tls,
            tokens=config.tokens,
            peer_silence_s=config.health.hang_timeout_s,
        )
        service = RouterService(generator, registry, admission, config.requests.write_timeout_s)
        rpc.add(add_RouterServiceServicer_to_server, service, SERVICE_NAME)
        if config.answers_sglang:
            add_sglang(rpc, generator, registry, admission, config)
        await stack.enter_async_context(_running(registry))
        # Before HTTP, whose /ready speaks for both.
        await rpc.start()
        stack.push_async_callback(rpc.stop, 0)
        http_address: str | None = None
        if config.http_listen is not None:
            http = HttpApp(
                generator,
                registry,
                admission,
                metrics,
                tokens=config.tokens,
                limits=config.requests,
                executor=executor,
            )
            http_address = await stack.enter_async_context(running_http(http.app, config.http_listen, tls=config.tls))
        router = Router(rpc.address, http_address, registry, generator, admission, metrics, rpc)
        try:
            await rpc.set_serving(True)
            yield router
        finally:
            await router.drain()
            if not await admission.wait_until_idle(config.drain_grace_s):
                generator.end_all("this router is stopping")
                await admission.wait_until_idle(_LAST_WORDS_S)


def add_sglang(
    rpc: RpcServer, generator: Generator, registry: Registry, admission: Admission, config: RouterConfig
) -> None:
    """Lets a router answer SGLang's gateways too.

    Raises:
        InvalidRequestError: the package with their protocol is not installed.
    """
    try:
        from graftline.router.sglang.service import SglangService, add_to
    except ModuleNotFoundError as error:
        problem = f"needs {error.name}: pip install 'graftline[sglang]'"
        raise InvalidRequestError("answers_sglang", problem) from error
    timeout_s, directory = config.requests.write_timeout_s, config.sglang_tokenizer_dir
    add_to(rpc, SglangService(generator, registry, admission, timeout_s, directory))


@asynccontextmanager
async def _running(registry: Registry) -> AsyncIterator[None]:
    """Runs the registry beside the block. Should it ever fail, the block is cancelled and its error raised."""
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(registry.run(), name="registry")
        try:
            yield
        except Exception as error:
            # Raised again below: a task group would wrap it.
            failure = error
        finally:
            task.cancel()
    if failure is not None:
        raise failure
