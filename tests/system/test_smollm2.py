"""The default model with its shipped draft head through the whole system: exact, and its drafts are accepted."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from system import System, SystemSpec, limited, running_system
from tiny_world import PlainModel

from graftline.client import Choice, Message
from graftline.engine.model_fetch import draft_head_path, resolve_model
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.request import Sampling
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape
from graftline.router.model import ServedModel
from graftline.router.text.chat_template import Message as TemplateMessage
from graftline.worker.facts import card_message

NEW_TOKENS = 20
GREEDY, SEEDED = Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=7)
HELDOUT = Path(__file__).resolve().parents[2] / "bench" / "prompts" / "heldout.jsonl"
KINDS = ("chat", "code", "tools", "arithmetic")


@pytest.fixture(scope="module")
def model_path() -> Path:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def plain(model_path: Path) -> dict[str, PlainModel]:
    return {"float32": PlainModel(model_path), "bfloat16": PlainModel(model_path, torch.bfloat16)}


@pytest.fixture(scope="module")
def served(model_path: Path) -> ServedModel:
    return ServedModel.load(card_message(open_checkpoint(model_path).card, with_text=True))


@pytest.fixture(scope="module")
def chats() -> list[tuple[Message, ...]]:
    """The two shortest held-out chats of every kind."""
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    by_kind = [sorted((row["messages"] for row in rows if row["kind"] == kind), key=_size)[:2] for kind in KINDS]
    return [tuple(Message(turn["role"], turn["content"]) for turn in chat) for group in by_kind for chat in group]


def _size(messages: list[dict[str, str]]) -> int:
    return sum(len(turn["content"]) for turn in messages)


async def ask(system: System, chat: tuple[Message, ...], sampling: Sampling) -> Choice:
    completion = await system.client.complete(
        chat,
        max_tokens=NEW_TOKENS,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        timeout_s=240,
    )
    return completion.choices[0]


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "shape", "prefill_split", "decode_split", "page_size"),
    [
        ("bfloat16", TreeShape(3, 1, 4), (30,), (16, 14), 16),
        ("bfloat16", TreeShape(4, 2, 8), (11, 19), (9, 12, 9), 1),
        ("float32", TreeShape(3, 1, 4), (14, 16), (18, 12), 16),
        ("float32", NO_SPECULATION, (30,), (30,), 16),
    ],
    ids=["bf16-chain", "bf16-tree", "f32-chain", "f32-plain"],
)
async def test_default_model_is_exact(
    model_path: Path,
    plain: dict[str, PlainModel],
    served: ServedModel,
    chats: list[tuple[Message, ...]],
    dtype: str,
    shape: TreeShape,
    prefill_split: tuple[int, ...],
    decode_split: tuple[int, ...],
    page_size: int,
) -> None:
    """A cross-section of the parity matrix on the real model: eight chats, greedy and seeded, at once and alone."""
    head = draft_head_path(model_path)
    assert head is not None, "the model comes without its draft head"
    spec = SystemSpec(
        model=model_path,
        head=head if shape.speculates else None,
        tree=shape,
        prefill_split=prefill_split,
        decode_split=decode_split,
        page_size=page_size,
        num_tokens=4096,
        chunk_tokens=32,
        dtype=dtype,
    )
    samplings = [SEEDED if index % 4 == 3 else GREEDY for index in range(len(chats))]
    async with running_system(spec) as system:
        together = await limited(
            [ask(system, chat, sampling) for chat, sampling in zip(chats, samplings, strict=True)], len(chats)
        )
        alone = await ask(system, chats[0], GREEDY)
    for chat, sampling, choice in zip(chats, samplings, together, strict=True):
        prompt = served.encode_chat([TemplateMessage(turn.role, turn.content) for turn in chat], 1 << 20)
        expected = await asyncio.to_thread(
            plain[dtype].answer, prompt, NEW_TOKENS, sampling, eos_ids=tuple(served.eos_token_ids)
        )
        assert list(choice.token_ids) == expected
    assert alone.token_ids == together[0].token_ids
    if shape.speculates:
        rounds = sum(choice.finish.speculation.rounds for choice in together)
        accepted = sum(choice.finish.speculation.accepted for choice in together)
        assert (rounds + accepted) / rounds > 1.5, "the shipped head's drafts are not accepted"
