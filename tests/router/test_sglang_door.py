"""SGLang's scheduler protocol on a router, asked with the generated stubs of the gateways' own package."""

import asyncio
import io
import itertools
import json
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from router_fakes import EOS, VOCAB_SIZE, FakeWorker, decode, prefill, reference_ids
from router_harness import Harness, harness, until
from smg_grpc_proto import sglang_scheduler_pb2 as pb2
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb2_grpc
from smg_grpc_proto.generated import common_pb2 as smg_common_pb2
from tokenizers import Tokenizer

from graftline.proto.channel import open_channel
from graftline.proto.status import error_from_rpc
from graftline.router.sglang.tokenizer_files import CHUNK_BYTES, chunks

IDS = list(b"once upon a time")


@asynccontextmanager
async def door(*workers: FakeWorker, **changes: Any) -> AsyncIterator[tuple[Harness, Any]]:
    workers = workers or (prefill(), decode())
    async with harness(*workers, answers_sglang=True, **changes) as h, open_channel(h.router.address) as channel:
        yield h, pb2_grpc.SglangSchedulerStub(channel)


def asked(request_id: str = "r", *, stream: bool = True, ids: list[int] = IDS, **sampling: Any) -> Any:
    """What a gateway sends: it always says what it wants of every sampling field."""
    defaults = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "n": 1, "max_new_tokens": 10}
    return pb2.GenerateRequest(
        request_id=request_id,
        tokenized=pb2.TokenizedInput(input_ids=ids),
        sampling_params=pb2.SamplingParams(**{**defaults, **sampling}),
        logprob_start_len=-1,
        stream=stream,
    )


async def test_chunks_then_the_whole() -> None:
    worker = decode()
    async with door(prefill(), worker) as (h, stub):
        messages = [message async for message in stub.Generate(asked("gateway-1"))]
        expected = reference_ids(IDS, 10, worker.requests[0].sampling.seed)
        h.assert_quiescent()
    *parts, last = messages
    assert {message.request_id for message in messages} == {"gateway-1"}
    assert [token for message in parts for token in message.chunk.token_ids] == expected
    lengths = [len(message.chunk.token_ids) for message in parts]
    assert [message.chunk.completion_tokens for message in parts] == list(itertools.accumulate(lengths))
    whole = last.complete
    assert list(whole.output_ids) == expected
    assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens) == ("length", len(IDS), 10)
    # 3 rounds of 3 drafts, each of which kept 2 of them.
    assert (whole.spec_draft_tokens, whole.spec_accepted_tokens) == (9, 6)
    assert whole.WhichOneof("matched_stop") is None


async def test_without_a_stream_there_is_only_the_whole() -> None:
    async with door() as (_, stub):
        (message,) = [message async for message in stub.Generate(asked(stream=False))]
        assert len(message.complete.output_ids) == 10


async def test_every_choice_has_its_index_and_its_whole() -> None:
    async with door() as (_, stub):
        request = asked(n=3, temperature=1.0)
        messages = [message async for message in stub.Generate(request)]
    wholes = {message.complete.index: message.complete for message in messages if message.HasField("complete")}
    assert sorted(wholes) == [0, 1, 2]
    for index, whole in wholes.items():
        parts = [message.chunk for message in messages if message.HasField("chunk") and message.chunk.index == index]
        assert [token for part in parts for token in part.token_ids] == list(whole.output_ids)


async def test_what_ended_it_is_told() -> None:
    ids = list(b"one two three")
    async with door(prefill(), decode(forced_ids=[*ids, EOS])) as (_, stub):
        by_token = [message async for message in stub.Generate(asked(max_new_tokens=50))][-1].complete
        by_text = [message async for message in stub.Generate(asked(max_new_tokens=50, stop=["two"]))][-1].complete
    assert (by_token.finish_reason, by_token.matched_token_id) == ("stop", EOS)
    assert (by_text.finish_reason, by_text.matched_stop_str) == ("stop", "two")
    assert bytes(by_text.output_ids) == b"one two"


async def test_logprobs() -> None:
    async with door() as (_, stub):
        request = asked(max_new_tokens=4)
        request.return_logprob, request.top_logprobs_num = True, 2
        *parts, last = [message async for message in stub.Generate(request)]
    whole = last.complete.output_logprobs
    assert list(whole.token_ids) == list(last.complete.output_ids)
    assert list(whole.token_logprobs) == [-0.5] * 4
    assert [list(top.token_ids) for top in whole.top_logprobs] == [[0, 1]] * 4
    assert sum(len(part.chunk.output_logprobs.token_logprobs) for part in parts) == 4


async def test_abort_ends_a_request_by_the_gateways_name() -> None:
    worker = decode(token_delay_s=0.02)
    async with door(prefill(), worker) as (h, stub):
        call = stub.Generate(asked("long", max_new_tokens=3000))
        first = await call.read()
        assert first.chunk.token_ids
        assert (await stub.Abort(pb2.AbortRequest(request_id="long"))).success
        last = first
        while (message := await call.read()) is not grpc.aio.EOF:
            last = message
        assert last.complete.finish_reason == "abort"
        await asyncio.wait_for(worker.cancelled.wait(), 5)
        assert not (await stub.Abort(pb2.AbortRequest(request_id="long"))).success
        await h.until_quiescent()


async def test_a_gateway_that_leaves_ends_it_too() -> None:
    """CASES G01."""
    worker = decode(token_delay_s=0.02)
    async with door(prefill(), worker) as (h, stub):
        call = stub.Generate(asked(max_new_tokens=3000))
        await call.read()
        call.cancel()
        await asyncio.wait_for(worker.cancelled.wait(), 5)
        await h.until_quiescent()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("sampling_params.frequency_penalty", {"frequency_penalty": 0.5}),
        ("sampling_params.repetition_penalty", {"repetition_penalty": 1.1}),
        ("sampling_params.regex", {"regex": "a+"}),
        ("sampling_params.logit_bias", {"logit_bias": {"x": 1.0}}),
        ("logit_bias", {"logit_bias": {str(VOCAB_SIZE): 1.0}}),
        ("temperature", {"temperature": -1.0}),
        ("top_k", {"top_k": -5}),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(field: str, change: dict[str, Any]) -> None:
    """CASES I05, I07: before any worker sees it."""
    worker = decode()
    async with door(prefill(), worker) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Generate(asked(**change)).read()
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in str(error_from_rpc(refusal.value))
        assert not worker.requests


async def test_fields_outside_sampling_are_refused_too() -> None:
    """CASES G54: a gateway that takes the fleet for a prefill or a decode hears of it."""
    async with door() as (_, stub):
        for name, value in (("lora_id", "x"), ("return_hidden_states", True), ("input_embeds", [1.0])):
            request = asked()
            request.MergeFrom(pb2.GenerateRequest(**{name: value}))
            with pytest.raises(grpc.aio.AioRpcError, match=name):
                await stub.Generate(request).read()
        half = asked()
        half.disaggregated_params.CopyFrom(pb2.DisaggregatedParams())
        assert await stub.Generate(half).read() is not grpc.aio.EOF, "an empty message asks for nothing"
        half.disaggregated_params.bootstrap_host = "prefill"
        with pytest.raises(grpc.aio.AioRpcError, match="disaggregated_params: this worker is a regular one"):
            await stub.Generate(half).read()
        prompt_logprobs = asked()
        prompt_logprobs.return_logprob, prompt_logprobs.logprob_start_len = True, 0
        with pytest.raises(grpc.aio.AioRpcError, match="logprob_start_len"):
            await stub.Generate(prompt_logprobs).read()
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Embed(pb2.EmbedRequest())
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_who_it_is_and_how_it_is(tmp_path: Path) -> None:
    directory = tmp_path / "tokenizer"
    worker = decode()
    async with door(prefill(), worker, sglang_tokenizer_dir=directory) as (h, stub):
        assert (await stub.HealthCheck(pb2.HealthCheckRequest())).healthy
        model = await stub.GetModelInfo(pb2.GetModelInfoRequest())
        assert (model.model_path, model.served_model_name, model.is_generation) == ("tiny", "tiny", True)
        assert (model.vocab_size, list(model.eos_token_ids)) == (VOCAB_SIZE, [EOS])
        assert model.tokenizer_path == str(directory)
        assert Tokenizer.from_file(str(directory / "tokenizer.json")).encode("once").ids == list(b"once")
        server = await stub.GetServerInfo(pb2.GetServerInfoRequest())
        assert server.server_args["served_model_name"] == "tiny"
        worker.load.pages_total, worker.load.pages_free, worker.load.accept_length = 10, 4, 2.5
        await until(lambda: any(known.load.accept_length for known in h.router.registry.workers))
        (load,) = (await stub.GetLoads(pb2.GetLoadsRequest())).loads
        assert (load.num_used_tokens, load.max_total_num_tokens, load.max_running_requests) == (96, 160, 8)
        assert load.speculative.accept_length == 2.5
        await h.router.drain()
        assert not (await stub.HealthCheck(pb2.HealthCheckRequest())).healthy


async def test_the_tokenizer_comes_as_an_archive() -> None:
    async with door() as (_, stub):
        pieces = [piece async for piece in stub.GetTokenizer(smg_common_pb2.GetTokenizerRequest())]
    archive = zipfile.ZipFile(io.BytesIO(b"".join(piece.data for piece in pieces)))
    assert pieces[-1].sha256
    config = json.loads(archive.read("tokenizer_config.json"))
    assert config["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in config["chat_template"]
    assert Tokenizer.from_str(archive.read("tokenizer.json").decode()).encode("ab").ids == list(b"ab")


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_only_the_last_piece_carries_the_hash(size: int) -> None:
    pieces = list(chunks(b"x" * size))
    assert b"".join(data for data, _ in pieces) == b"x" * size
    assert [bool(digest) for _, digest in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_a_router_answers_it_only_when_told_to() -> None:
    async with harness(prefill(), decode()) as h, open_channel(h.router.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await pb2_grpc.SglangSchedulerStub(channel).HealthCheck(pb2.HealthCheckRequest())
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
