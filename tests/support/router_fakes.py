"""Fake workers for router tests: real aio gRPC servers with a scripted decode, as fault injectors.

Their "model" is a pure function of (seed, position, last token), so that a stream resumed elsewhere must go on with
the very tokens the first worker would have had.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from graftline.decode_server.call_stream import CallContext, CallStream
from graftline.errors import GraftlineError
from graftline.proto.server import RpcServer
from graftline.proto.status import Leg, abort_with, rpc_border
from graftline.proto.v1.common_pb2 import (
    Fingerprint,
    FinishReason,
    ModelCard,
    SpeculationStats,
    TokenLogprob,
    TopLogprob,
    TreeOrigin,
    Usage,
    WorkerIdentity,
    WorkerRole,
)
from graftline.proto.v1.decode_pb2 import (
    DecodeFinished,
    DecodeServiceGenerateRequest,
    DecodeServiceGenerateResponse,
    DecodeTokens,
)
from graftline.proto.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from graftline.proto.v1.worker_pb2 import (
    DescribeResponse,
    DrainResponse,
    Limits,
    WatchResponse,
    WorkerState,
)
from graftline.proto.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from graftline.proto.validation import ModelLimits, check_decode_request
from graftline.router.text.detokenizer import byte_level_alphabet

EOS = 256
BOS = 257
IM_START = 258
VOCAB_SIZE = 260
CONTEXT_LENGTH = 4096
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens (id = byte), then <|im_end|> = EOS, <s> = BOS, <|im_start|>, <pad>."""
    vocab = {char: byte for byte, char in enumerate(byte_level_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_end|>", "<s>", "<|im_start|>", "<pad>")]
    )
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Sentencepiece style: pieces with a space mark, and <0xXX> for every byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁é", "😀", "▁the"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def model_card(**changes: Any) -> ModelCard:
    """The card of the fake model."""
    card = ModelCard(
        model_id="tiny",
        vocab_size=VOCAB_SIZE,
        context_length=CONTEXT_LENGTH,
        eos_token_ids=[EOS],
        bos_token_id=-1,
        tokenizer_json=byte_tokenizer().to_str().encode(),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"bos_token": "<s>", "eos_token": "<|im_end|>"},
    )
    for name, value in changes.items():
        if name == "eos_token_ids":
            del card.eos_token_ids[:]
            card.eos_token_ids.extend(value)
        elif name == "sampling_defaults":
            card.sampling_defaults.CopyFrom(value)
        else:
            setattr(card, name, value)
    nameless = ModelCard()
    nameless.CopyFrom(card)
    nameless.ClearField("model_id")
    card.card_hash = hashlib.sha256(nameless.SerializeToString(deterministic=True)).hexdigest()
    return card


def next_token(token_ids: Sequence[int], seed: int) -> int:
    """The fake model: a lower-case letter or a space, from position, last token and seed."""
    mixed = (len(token_ids) * 7919 + token_ids[-1] * 104729 + seed * 1299709) & 0xFFFFFFFF
    mixed = (mixed * 2654435761) & 0xFFFFFFFF
    return b"abcdefghijklmnopqrstuvwxyz "[(mixed >> 8) % 27]


def reference_ids(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What a fault-free run emits."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids, seed))
    return ids[len(prompt) :]


@dataclass
class Fault:
    """What happens to one request, after `after` tokens of the attempt."""

    after: int
    error: GraftlineError | None = None
    leg: Leg | None = None
    # The stream stands still until cancelled.
    hang: bool = False
    # The stream ends with OK but without `finished`.
    vanish: bool = False
    speculation: SpeculationStats | None = None


@dataclass
class FakeWorker:
    """One fake worker process: server, script, and a record of what reached it."""

    role: "WorkerRole.ValueType"
    card: ModelCard = field(default_factory=model_card)
    incarnation: str = "one"
    fingerprint: dict[str, str] = field(
        default_factory=lambda: {"model_hash": "m", "page_size": "16", "draft_nodes": "4"}
    )
    limits: Limits = field(default_factory=lambda: Limits(max_request_tokens=CONTEXT_LENGTH, max_running=8))
    # Overrides of what Watch says.
    load: WatchResponse = field(default_factory=lambda: WatchResponse(state=WorkerState.WORKER_STATE_SERVING))
    round_tokens: int = 3
    token_delay_s: float = 0.0
    first_delay_s: float = 0.0
    model: Callable[[Sequence[int], int], int] = next_token
    forced_ids: Sequence[int] | None = None
    faults: deque[Fault] = field(default_factory=deque)
    always: Fault | None = None
    requests: list[DecodeServiceGenerateRequest] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    first_token_sent: asyncio.Event = field(default_factory=asyncio.Event)
    # Of `GenerateMany`: how often it was called, and its messages in and out.
    num_streams: int = 0
    num_received: int = 0
    num_sent: int = 0
    # Its calls that were cancelled, and those because their answers were whole.
    num_cancelled: int = 0
    num_answered: int = 0
    stream: CallStream | None = None
    num_running: int = 0
    num_decoding: int = 0
    num_steps: int = 0
    num_described: int = 0
    known_hashes: list[str] = field(default_factory=list)
    frozen: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    server: RpcServer | None = None
    address: str = ""
    # Bearer tokens it asks for.
    tokens: Sequence[str] = ()

    async def start(self, listen: str = "127.0.0.1:0") -> "FakeWorker":
        self.server = RpcServer(listen, tokens=self.tokens)
        self.server.add(add_WorkerServiceServicer_to_server, FakeWorkerService(self), "graftline.v1.WorkerService")
        if self.role == WorkerRole.WORKER_ROLE_DECODE:
            self.server.add(add_DecodeServiceServicer_to_server, FakeDecodeService(self), "graftline.v1.DecodeService")
        await self.server.start()
        await self.server.set_serving(True)
        self.address = self.server.address
        return self

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
            self.server = None

    async def restart(self, incarnation: str) -> None:
        """A new process at the same address."""
        address = self.address
        await self.stop()
        self.incarnation = incarnation
        await self.start(address)


class FakeWorkerService(WorkerServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Describe(self, request: Any, context: Any) -> DescribeResponse:
        worker = self._worker
        worker.num_described += 1
        worker.known_hashes.append(request.known_card_hash)
        card = ModelCard()
        card.CopyFrom(worker.card)
        if request.known_card_hash == card.card_hash:
            card.ClearField("tokenizer_json")
            card.ClearField("chat_template")
        return DescribeResponse(
            identity=WorkerIdentity(role=worker.role, incarnation=worker.incarnation, address=worker.address),
            model_card=card,
            fingerprint=Fingerprint(fields=worker.fingerprint),
            num_stages=2,
            limits=worker.limits,
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[WatchResponse]:
        worker = self._worker
        while True:
            if worker.frozen.is_set():
                await asyncio.Event().wait()
            message = WatchResponse()
            message.CopyFrom(worker.load)
            message.incarnation = worker.incarnation
            message.running = worker.load.running or worker.num_decoding
            message.queued = worker.load.queued or worker.num_running - worker.num_decoding
            message.progress = worker.load.progress or worker.num_steps
            yield message
            worker.changed.clear()
            try:
                async with asyncio.timeout(request.interval_s):
                    await worker.changed.wait()
            except TimeoutError:
                pass

    async def Drain(self, request: Any, context: Any) -> DrainResponse:
        self._worker.load.state = WorkerState.WORKER_STATE_DRAINING
        self._worker.changed.set()
        return DrainResponse()


@dataclass
class _Counting:
    """The context of a stream, with its messages counted."""

    context: Any
    worker: FakeWorker

    async def send_initial_metadata(self, metadata: Any) -> None:
        await self.context.send_initial_metadata(metadata)

    async def read(self) -> Any:
        message = await self.context.read()
        self.worker.num_received += 1
        return message

    async def write(self, message: Any) -> None:
        self.worker.num_sent += 1
        await self.context.write(message)


class FakeDecodeService(DecodeServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def GenerateMany(self, request_iterator: Any, context: Any) -> None:
        worker = self._worker
        worker.num_streams += 1
        stream = worker.stream = CallStream(_Counting(context, worker), self._carried, 30)
        await stream.serve()

    async def _carried(self, request: Any, call: CallContext) -> None:
        try:
            async with aclosing(self.Generate(request, call)) as responses:
                async for response in responses:
                    await call.write(response)
        except asyncio.CancelledError:
            self._worker.num_answered += call.is_answered
            self._worker.num_cancelled += 1
            raise

    async def Generate(self, request: Any, context: Any) -> AsyncGenerator[DecodeServiceGenerateResponse, None]:
        worker = self._worker
        worker.requests.append(request)
        worker.num_running += 1
        num_steps = 0
        try:
            async with rpc_border(context):
                check_decode_request(request, ModelLimits(worker.card.vocab_size, worker.card.context_length))
            async for response in self._generate(request, context):
                worker.num_decoding += num_steps == 0
                num_steps += 1
                worker.num_steps += 1
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            worker.cancelled.set()
            raise
        finally:
            worker.num_running -= 1
            worker.num_decoding -= num_steps > 0

    async def _generate(self, request: Any, context: Any) -> AsyncIterator[DecodeServiceGenerateResponse]:
        worker = self._worker
        fault = worker.always or (worker.faults.popleft() if worker.faults else None)
        ids = list(request.token_ids)
        num_earlier = len(ids) - request.num_prompt_tokens
        limit = request.stopping.max_tokens - num_earlier
        ending_ids = {*request.stopping.stop_token_ids, *([] if request.stopping.ignore_eos else [EOS])}
        emitted: list[int] = []
        # All of a prompt that was computed before, as an attempt which goes on with a stream finds it.
        num_cached = len(ids) if num_earlier else 2
        rounds = 0
        await asyncio.sleep(worker.first_delay_s)
        while True:
            if fault is not None and len(emitted) >= fault.after:
                if fault.hang:
                    await asyncio.Event().wait()
                if fault.vanish:
                    return
                assert fault.error is not None
                await abort_with(context, fault.error, leg=fault.leg, speculation=fault.speculation)
            wanted = 1 if not emitted else worker.round_tokens
            if fault is not None:
                wanted = min(wanted, fault.after - len(emitted))
            rounds += bool(emitted)
            step: list[int] = []
            while len(step) < wanted and len(emitted) + len(step) < limit:
                position = num_earlier + len(emitted) + len(step)
                if worker.forced_ids is not None:
                    token = worker.forced_ids[position] if position < len(worker.forced_ids) else EOS
                else:
                    token = worker.model(ids, request.sampling.seed)
                ids.append(token)
                step.append(token)
                if token in ending_ids:
                    break
            emitted += step
            logprobs = []
            if request.HasField("logprobs"):
                top = [TopLogprob(token_id=i, logprob=-float(i)) for i in range(request.logprobs)]
                logprobs = [TokenLogprob(logprob=-0.5, top=top) for _ in step]
            tokens = DecodeTokens(token_ids=step, logprobs=logprobs)
            if len(emitted) == len(step):
                tokens.cached_tokens = num_cached
            yield DecodeServiceGenerateResponse(tokens=tokens)
            worker.first_token_sent.set()
            stopped = bool(step) and step[-1] in ending_ids
            if stopped or len(emitted) >= limit:
                break
            if worker.token_delay_s:
                await asyncio.sleep(worker.token_delay_s)
        yield DecodeServiceGenerateResponse(
            finished=DecodeFinished(
                reason=FinishReason.FINISH_REASON_STOP if stopped else FinishReason.FINISH_REASON_LENGTH,
                stop_token_id=emitted[-1] if stopped else None,
                usage=Usage(
                    prompt_tokens=request.num_prompt_tokens, completion_tokens=len(emitted), cached_tokens=num_cached
                ),
                speculation=SpeculationStats(
                    rounds=rounds,
                    drafted=3 * rounds,
                    accepted=len(emitted) - 1 - rounds,
                    first_round_drafted=min(rounds, 1) * 3,
                    first_round_accepted=min(rounds, 1) * 2,
                    tree_origin=TreeOrigin.TREE_ORIGIN_REAL,
                ),
            )
        )


def prefill(**changes: Any) -> FakeWorker:
    return FakeWorker(WorkerRole.WORKER_ROLE_PREFILL, **changes)


def decode(**changes: Any) -> FakeWorker:
    return FakeWorker(WorkerRole.WORKER_ROLE_DECODE, **changes)


@asynccontextmanager
async def started(*workers: FakeWorker) -> AsyncIterator[None]:
    """Runs fake workers."""
    try:
        for worker in workers:
            await worker.start()
        yield
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))
