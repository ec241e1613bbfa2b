"""A real prefill service and a real decode service over real gRPC, in one process, with engines of the test's."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fake_engines import VOCAB_SIZE, FakeDecodeEngine, FakePrefillEngine, token_at

from graftline.decode_server.peers import PrefillPeers
from graftline.decode_server.service import DecodeService
from graftline.decode_server.settings import ServiceSettings as DecodeSettings
from graftline.metrics import Metrics, ProcessRole
from graftline.prefill_server.service import PrefillService
from graftline.prefill_server.settings import ServiceSettings as PrefillSettings
from graftline.proto.channel import ANONYMOUS, open_channel
from graftline.proto.server import RpcServer
from graftline.proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from graftline.proto.validation import ModelLimits
from graftline.tracing import NO_TRACER, Tracer
from graftline.worker.metrics import DecodeMetrics, PrefillMetrics
from graftline.worker.tasks import Tasks

EOS = 2
LIMITS = ModelLimits(vocab_size=VOCAB_SIZE, context_length=128)
FINGERPRINT = common_pb2.Fingerprint(fields={"model_hash": "abc", "page_size": "16"})
QUICK = DecodeSettings(pair_timeout_s=2.0, peer_silence_s=2.0, drain_timeout_s=5.0)


@dataclass
class Directory:
    """Pairs with everybody."""

    paired: dict[str, Sequence[common_pb2.StageLayout]] = field(default_factory=dict)

    def pair(self, decode: common_pb2.WorkerIdentity, stages: Sequence[common_pb2.StageLayout]) -> None:
        self.paired[decode.incarnation] = stages

    def is_paired(self, decode_incarnation: str) -> bool:
        return decode_incarnation in self.paired


@dataclass
class PrefillSide:
    engine: FakePrefillEngine
    service: PrefillService
    server: RpcServer
    directory: Directory

    @property
    def address(self) -> str:
        return self.server.address

    async def kill(self) -> None:
        """As if the process died: connections break, nothing is said."""
        await self.server.server.stop(0)


@dataclass
class DecodeSide:
    engine: FakeDecodeEngine
    service: DecodeService
    server: RpcServer
    stub: Any

    def call(self, prefill_address: str, *, max_tokens: int = 8, prompt_len: int = 5, **changes: Any) -> Any:
        return self.stub.Generate(request_message(prefill_address, max_tokens, prompt_len, **changes))

    async def whole(self, *, quarantined: int = 0) -> None:
        """Waits until nothing is open, then checks that nothing is held."""
        await asyncio.wait_for(self.service.wait_idle(), 10)
        self.engine.check_quiescent(quarantined=quarantined)


def request_message(
    prefill_address: str, max_tokens: int = 8, prompt_len: int = 5, **changes: Any
) -> decode_pb2.DecodeServiceGenerateRequest:
    message = decode_pb2.DecodeServiceGenerateRequest(
        request_id=uuid.uuid4().hex,
        attempt=1,
        prefill_address=prefill_address,
        token_ids=range(10, 10 + prompt_len),
        num_prompt_tokens=prompt_len,
        sampling=common_pb2.SamplingParams(top_p=1.0),
        stopping=common_pb2.StoppingParams(max_tokens=max_tokens),
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def expected_ids(max_tokens: int = 8, prompt_len: int = 5) -> list[int]:
    return [token_at(position) for position in range(prompt_len, prompt_len + max_tokens)]


async def collect(call: Any) -> tuple[list[int], decode_pb2.DecodeFinished]:
    """Every token of a call that ends well, and its last message."""
    ids: list[int] = []
    finished = None
    async for response in call:
        assert finished is None, "something came after `finished`"
        if response.HasField("finished"):
            finished = response.finished
        else:
            ids.extend(response.tokens.token_ids)
    assert finished is not None
    return ids, finished


@asynccontextmanager
async def prefill_side(
    *held: str,
    listen: str = "127.0.0.1:0",
    incarnation: str | None = None,
    settings: PrefillSettings = PrefillSettings(),  # noqa: B008 - frozen
    fingerprint: common_pb2.Fingerprint = FINGERPRINT,
    engine: FakePrefillEngine | None = None,
    limits: ModelLimits = LIMITS,
    tracer: Tracer = NO_TRACER,
) -> AsyncIterator[PrefillSide]:
    engine = engine or FakePrefillEngine(*held)
    server = RpcServer(listen)
    server.bind()
    identity = common_pb2.WorkerIdentity(
        role=common_pb2.WORKER_ROLE_PREFILL, incarnation=incarnation or uuid.uuid4().hex, address=server.address
    )
    directory = Directory()
    service = PrefillService(
        identity=identity,
        engine=engine,
        directory=directory,
        fingerprint=fingerprint,
        num_stages=1,
        limits=limits,
        eos_token_ids=frozenset({EOS}),
        settings=settings,
        metrics=PrefillMetrics(Metrics(ProcessRole.PREFILL)),
        tracer=tracer,
    )
    server.add(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, service, "graftline.v1.PrefillService")
    await server.start()
    try:
        yield PrefillSide(engine, service, server, directory)
    finally:
        await server.stop(0)
        engine.close()


@asynccontextmanager
async def decode_side(
    engine: FakeDecodeEngine | None = None,
    settings: DecodeSettings = QUICK,
    limits: ModelLimits = LIMITS,
    tracer: Tracer = NO_TRACER,
) -> AsyncIterator[DecodeSide]:
    engine = engine or FakeDecodeEngine()
    server = RpcServer("127.0.0.1:0")
    server.bind()
    identity = common_pb2.WorkerIdentity(
        role=common_pb2.WORKER_ROLE_DECODE, incarnation=uuid.uuid4().hex, address=server.address
    )
    async with AsyncExitStack() as stack:
        peers = PrefillPeers(
            identity=identity,
            fingerprint=FINGERPRINT,
            layouts=[],
            access=ANONYMOUS,
            pair_timeout_s=settings.pair_timeout_s,
            max_peers=settings.max_peers,
            forget_incarnation=engine.forget_peer,
        )
        stack.push_async_callback(peers.close)
        tasks = await stack.enter_async_context(Tasks())
        service = DecodeService(
            identity=identity,
            engine=engine,
            peers=peers,
            limits=limits,
            eos_token_ids=frozenset({EOS}),
            settings=settings,
            spawn=tasks.start,
            metrics=DecodeMetrics(Metrics(ProcessRole.DECODE)),
            tracer=tracer,
        )
        server.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, service, "graftline.v1.DecodeService")
        await server.start()
        channel = open_channel(server.address)
        try:
            yield DecodeSide(engine, service, server, decode_pb2_grpc.DecodeServiceStub(channel))
        finally:
            await channel.close()
            await server.stop(0)
            await asyncio.wait_for(service.wait_idle(), 15)
    engine.close()
