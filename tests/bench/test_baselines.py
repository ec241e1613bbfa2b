"""Baselines as real child processes on a tiny model: they must say what the reference says."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from graftline.bench.baseline_models import PromptEncoder, open_baseline, transformers_config
from graftline.bench.baseline_protocol import BaselineDtype, BaselineKind, BaselineSettings
from graftline.bench.baselines import running_baseline
from graftline.bench.load import Concurrency, send_all
from graftline.bench.prompt_set import ChatMessage, Prompt
from graftline.bench.target import BenchRequest, Message
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.config import DENSE_FAMILIES, Family
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.random import write_tiny_model
from graftline.engine.models.reference import greedy
from graftline.errors import CancelledRequestError, InternalError, InvalidRequestError

PROMPT = Prompt(id="p", kind="chat", messages=(ChatMessage("user", "tell me, tell me, tell me"),))
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), layers=2)


def settings(kind: BaselineKind, path: Path, **changes: object) -> BaselineSettings:
    return BaselineSettings(kind=kind, model=str(path), threads=1, **changes)  # type: ignore[arg-type]


def reference(path: Path, num_tokens: int = NUM_TOKENS) -> list[int]:
    checkpoint = open_checkpoint(path)
    dense = DenseModel(checkpoint, range(checkpoint.config.num_layers), torch.float32)
    with torch.inference_mode():
        return greedy(dense, PromptEncoder(checkpoint).encode(PROMPT), num_tokens)


def in_process(made: BaselineSettings, num_tokens: int = NUM_TOKENS, ignore_eos: bool = True) -> list[list[int]]:
    """What is emitted, message by message."""
    emitted: list[list[int]] = []
    baseline, encoder = open_baseline(made)
    with torch.inference_mode():
        baseline.generate(
            encoder.encode(PROMPT), num_tokens, ignore_eos=ignore_eos, emit=lambda ids: emitted.append(list(ids))
        )
    return emitted


@pytest.mark.parametrize("kind", BaselineKind)
def test_every_baseline_gives_the_references_greedy_output(kind: BaselineKind, model: Path) -> None:
    emitted = in_process(settings(kind, model))
    assert [token_id for ids in emitted for token_id in ids] == reference(model)
    assert len(emitted) > 1


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_weights_reach_transformers_for_every_family(family: Family, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / family.value, layers=2, family=family, tie=family is Family.QWEN3)
    (emitted,) = zip(*in_process(settings(BaselineKind.TRANSFORMERS, path)), strict=True)
    assert list(emitted) == reference(path)


def test_a_config_in_transformers_words_equals_the_file_it_came_from(model: Path) -> None:
    import transformers

    config = open_checkpoint(model).config
    ours = transformers.AutoConfig.for_model(**transformers_config(config)).to_dict()
    theirs = transformers.AutoConfig.from_pretrained(model).to_dict()
    for name in (*transformers_config(config), "mlp_bias", "hidden_act"):
        assert ours[name] == theirs[name], name


def test_bfloat16_is_bfloat16(model: Path) -> None:
    from graftline.bench.baseline_models import load_transformers

    loaded = load_transformers(open_checkpoint(model), torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert in_process(settings(BaselineKind.PLAIN_LOOP, model, dtype=BaselineDtype.BFLOAT16))


async def test_a_child_streams_one_request_at_a_time_and_survives_bad_ones(model: Path) -> None:
    async with running_baseline(settings(BaselineKind.PLAIN_LOOP, model)) as target:
        assert target.threads == 1
        request = BenchRequest(PROMPT, NUM_TOKENS, ignore_eos=True)
        messages = await drain(target.stream(request, 60))
        assert [token_id for message in messages for token_id in message.token_ids] == reference(model)
        finish = messages[-1].finish
        assert finish is not None
        assert finish.reason == "length"
        assert finish.num_prompt_tokens == len(PromptEncoder(open_checkpoint(model)).encode(PROMPT))

        with pytest.raises(InvalidRequestError, match="temperature"):
            await drain(target.stream(BenchRequest(PROMPT, 1, temperature=0.5), 60))
        only_answers = Prompt(messages=(ChatMessage("assistant", "me"),))
        with pytest.raises(InvalidRequestError, match="messages"):
            await drain(target.stream(BenchRequest(only_answers, 1), 60))

        records = await send_all(target, [request] * 3, Concurrency(3), timeout_s=60)
        assert [record.num_output_tokens for record in records] == [NUM_TOKENS] * 3
        starts = sorted(record.due_s + record.arrivals[0].at_s for record in records)
        ends = sorted(record.due_s + record.end_s for record in records)
        assert starts[1] > ends[0], "one request at a time"

        with pytest.raises(CancelledRequestError, match="in time"):
            await drain(target.stream(BenchRequest(PROMPT, 400, ignore_eos=True), 0.02))
        # It cannot be cancelled, so it was ended.
        with pytest.raises(InternalError, match="process ended"):
            await drain(target.stream(BenchRequest(PROMPT, 1), 60))


async def test_a_model_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="model"):
        async with running_baseline(settings(BaselineKind.TRANSFORMERS, tmp_path / "none")):
            pass


async def drain(stream: AsyncGenerator[Message, None]) -> list[Message]:
    async with aclosing(stream) as messages:
        return [message async for message in messages]
