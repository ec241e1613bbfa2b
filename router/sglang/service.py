"""The gRPC face that SGLang's gateways know: `sglang.grpc.scheduler.SglangScheduler`, token ids in and out.

A router's whole fleet looks like one worker through it: a gateway in front sends what it has tokenized, and pairs,
retries and resumed streams stay this side's business. Imported when asked for; needs the extra `sglang`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto import sglang_scheduler_pb2 as pb2
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb2_grpc
from smg_grpc_proto.generated import common_pb2 as smg_common_pb2

from graftline import __version__
from graftline.errors import CancelledRequestError
from graftline.proto.server import RpcServer
from graftline.proto.status import rpc_border
from graftline.router.admission import Admission
from graftline.router.generation import Generation, Generator
from graftline.router.outbox import client_guard
from graftline.router.registry import Registry
from graftline.router.sglang.answer import SglangAnswer
from graftline.router.sglang.request import own_request
from graftline.router.sglang.tokenizer_files import chunks, tokenizer_files, write_missing, zipped
from graftline.router.worker import Role, Worker

SERVICE_NAME = "sglang.grpc.scheduler.SglangScheduler"


class SglangService(pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc]
    """Translates between that protocol and the generator. What is not here answers UNIMPLEMENTED.

    Args:
        tokenizer_dir: where gateways on this machine load tokenizer and template from; what is missing is written.
    """

    def __init__(
        self,
        generator: Generator,
        registry: Registry,
        admission: Admission,
        write_timeout_s: float,
        tokenizer_dir: Path | None = None,
    ) -> None:
        self._generator = generator
        self._registry = registry
        self._admission = admission
        self._write_timeout_s = write_timeout_s
        self._tokenizer_dir = tokenizer_dir
        self._started_at = time.time()
        self._open: dict[str, list[Generation]] = {}

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        """Streams chunks when asked to, and then the whole of every choice; an aborted one says so."""
        async with rpc_border(context):
            own = own_request(request)
            answer = SglangAnswer(request.request_id, len(own.tokens.token_ids), is_stream=request.stream)
            opened = self._generator.open([own], context.time_remaining(), context.invocation_metadata())
            async with opened as generation:
                with self._abortable(request.request_id, generation), client_guard(self._write_timeout_s) as guard:
                    async for message in _messages(generation, answer):
                        guard.writing()
                        await context.write(message)
                        guard.written()

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Ends a request by the gateway's name for it."""
        generations = self._open.get(request.request_id, [])
        for generation in generations:
            generation.abort()
        message = "" if generations else f"no request {request.request_id[:200]!r} is open"
        return pb2.AbortResponse(success=bool(generations), message=message)

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Healthy while some pair may serve."""
        if self._admission.is_draining:
            return pb2.HealthCheckResponse(healthy=False, message="draining")
        if not self._registry.has_pair():
            return pb2.HealthCheckResponse(healthy=False, message=self._registry.why_no_pair())
        return pb2.HealthCheckResponse(healthy=True, message="")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The model that an empty name means."""
        async with rpc_border(context):
            model = self._generator.model_named("")
            directory = self._tokenizer_dir
            if directory is not None:
                await asyncio.to_thread(write_missing, directory, tokenizer_files(model.card))
            return pb2.GetModelInfoResponse(
                model_path=model.model_id,
                tokenizer_path="" if directory is None else str(directory.absolute()),
                served_model_name=model.model_id,
                is_generation=True,
                weight_version="default",
                max_context_length=self._registry.max_request_tokens(model),
                max_req_input_len=self._registry.max_prompt_tokens(model) - 1,
                vocab_size=model.vocab_size,
                eos_token_ids=sorted(model.eos_token_ids),
                pad_token_id=min(model.eos_token_ids, default=0),
                bos_token_id=max(model.card.bos_token_id, 0),
            )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Facts that gateways label a worker with."""
        async with rpc_border(context):
            model = self._generator.model_named("")
            arguments, start_time = Struct(), Timestamp()
            arguments.update(
                {
                    "model_path": model.model_id,
                    "served_model_name": model.model_id,
                    "tp_size": 1,
                    "dp_size": 1,
                    "load_balance_method": "round_robin",
                    "disaggregation_mode": "null",
                    "version": __version__,
                }
            )
            start_time.FromNanoseconds(int(self._started_at * 1e9))
            return pb2.GetServerInfoResponse(
                server_args=arguments,
                active_requests=self._admission.num_open,
                uptime_seconds=time.time() - self._started_at,
                sglang_version=f"graftline {__version__}",
                server_type="grpc",
                start_time=start_time,
            )

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The fleet as one rank."""
        load = fleet_load(list(self._registry.workers))
        return pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=f"graftline {__version__}",
            dp_rank_count=1,
            loads=[load],
            aggregate=pb2.AggregateMetrics(
                total_running_reqs=load.num_running_reqs,
                total_waiting_reqs=load.num_waiting_reqs,
                total_reqs=load.num_total_reqs,
                avg_token_usage=load.token_usage,
                avg_throughput=load.gen_throughput,
                avg_utilization=load.utilization,
            ),
        )

    async def GetTokenizer(self, request: Any, context: Any) -> None:  # noqa: N802
        """Tokenizer and chat template, for gateways that were given none."""
        async with rpc_border(context):
            card = self._generator.model_named("").card
            archive = await asyncio.to_thread(lambda: zipped(tokenizer_files(card)))
            for data, digest in chunks(archive):
                await context.write(smg_common_pb2.GetTokenizerChunk(data=data, sha256=digest))

    @contextmanager
    def _abortable(self, request_id: str, generation: Generation) -> Iterator[None]:
        generations = self._open.setdefault(request_id, [])
        generations.append(generation)
        try:
            yield
        finally:
            generations.remove(generation)
            if not generations:
                del self._open[request_id]


def add_to(rpc: RpcServer, service: SglangService) -> None:
    """Lets a server answer the service."""
    rpc.add(pb2_grpc.add_SglangSchedulerServicer_to_server, service, SERVICE_NAME)


def fleet_load(workers: list[Worker]) -> Any:
    """Loads of all available workers in one: decodes run, prefills queue."""
    available = [worker for worker in workers if worker.is_available]
    decodes = [worker for worker in available if worker.role is Role.DECODE]
    pages = sum(worker.load.pages_total for worker in decodes)
    used = pages - sum(worker.load.pages_free for worker in decodes)
    page_size = max((worker.description.page_size for worker in decodes if worker.description), default=1)
    slots = sum(worker.description.limits.max_running for worker in decodes if worker.description)
    running = sum(worker.load.running for worker in decodes)
    waiting = sum(worker.load.queued for worker in available)
    lengths = [worker.load.accept_length for worker in decodes if worker.load.accept_length]
    return pb2.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=used * page_size,
        max_total_num_tokens=pages * page_size,
        token_usage=used / pages if pages else 0.0,
        gen_throughput=sum(worker.load.tokens_per_s for worker in decodes),
        utilization=running / slots if slots else 0.0,
        max_running_requests=slots,
        num_waiting_uncached_tokens=sum(worker.load.queued_tokens for worker in available),
        speculative=pb2.SpeculativeMetrics(accept_length=sum(lengths) / len(lengths)) if lengths else None,
    )


async def _messages(generation: Generation, answer: SglangAnswer) -> AsyncIterator[Any]:
    """What there is to say about a request, to its end or its abort."""
    try:
        async for delta in generation:
            for message in answer.messages(delta):
                yield message
    except CancelledRequestError:
        if not generation.is_aborted:
            raise
        for message in answer.aborted():
            yield message
