"""The least that a Python proxy can do, as a floor for `measure_overhead.py`: no text, no choice of workers, no checks.

`bare_call` makes a call of its own to the decode for every request, `bare_stream` sends all requests over one stream.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc

from graftline.proto.channel import open_channel
from graftline.proto.channel_options import server_options
from graftline.proto.v1.decode_pb2 import (
    CarriedCall,
    DecodeServiceGenerateRequest,
    DecodeServiceGenerateResponse,
    GenerateManyRequest,
)
from graftline.proto.v1.decode_pb2_grpc import DecodeServiceStub

Handler = Callable[[bytes, Any], Any]
# From the decode's address to a handler, for as long as the block is open.
Kind = Callable[[str], AbstractAsyncContextManager[Handler]]


@asynccontextmanager
async def bare_call(decode_address: str) -> AsyncIterator[Handler]:
    async with open_channel(decode_address) as channel:
        generate = channel.unary_stream("/graftline.v1.DecodeService/Generate")

        async def handler(request: bytes, context: Any) -> None:
            call = generate(request)
            while isinstance(message := await call.read(), bytes):
                await context.write(message)

        yield handler


@asynccontextmanager
async def bare_stream(decode_address: str) -> AsyncIterator[Handler]:
    ids = itertools.count(1)
    waiting: dict[int, asyncio.Queue[DecodeServiceGenerateResponse]] = {}
    unsent: asyncio.Queue[GenerateManyRequest] = asyncio.Queue()

    async def handler(request: bytes, context: Any) -> None:
        call_id = next(ids)
        mine = waiting[call_id] = asyncio.Queue()
        call = CarriedCall(call_id=call_id, request=DecodeServiceGenerateRequest.FromString(request))
        unsent.put_nowait(GenerateManyRequest(calls=[call]))
        while True:
            response = await mine.get()
            await context.write(response.SerializeToString())
            if response.HasField("finished"):
                del waiting[call_id]
                return

    async with open_channel(decode_address) as channel:
        stream: Any = DecodeServiceStub(channel).GenerateMany()  # type: ignore[call-arg]

        async def write() -> None:
            while True:
                await stream.write(await unsent.get())

        async def read() -> None:
            while message := await stream.read():
                for event in message.events:
                    waiting[event.call_id].put_nowait(event.response)

        tasks = [asyncio.create_task(write()), asyncio.create_task(read())]
        yield handler
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def running_proxy(kind: Kind, decode_address: str) -> AsyncIterator[str]:
    """Yields the proxy's address."""
    server = grpc.aio.server(options=server_options())
    async with kind(decode_address) as handler:
        method = grpc.unary_stream_rpc_method_handler(handler)
        service = grpc.method_handlers_generic_handler("graftline.v1.DecodeService", {"Generate": method})
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
        await server.stop(0)
