"""Turn marks found in a chat template, and the openings that dialogs start from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import graftline
from graftline.engine.draft_head.dialogs import DialogWriter
from graftline.engine.draft_head.prompts import KINDS, opening
from graftline.engine.models.card import ModelCardData
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.errors import InvalidRequestError

HELD_OUT = Path(graftline.__file__).parent / "bench" / "prompts" / "heldout.jsonl"


@pytest.fixture(scope="module")
def card(tiny_target: Path) -> ModelCardData:
    return open_checkpoint(tiny_target).card


def test_turn_marks_of_chatml(card: ModelCardData) -> None:
    writer = DialogWriter(card)
    assert writer.decode(writer.format.user_to_answer) == "<|im_end|>\n<|im_start|>assistant\n"
    assert writer.decode(writer.format.answer_to_user) == "<|im_end|>\n<|im_start|>user\n"
    assert writer.format.end_ids == card.eos_token_ids
    assert set(writer.format.end_ids) <= set(writer.format.always_kept)


def test_turn_marks_of_another_template(card: ModelCardData) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    writer = DialogWriter(replace(card, chat_template=template))
    assert writer.decode(writer.format.user_to_answer) == "<|endoftext|>[assistant]"
    assert writer.decode(writer.format.answer_to_user) == "<|endoftext|>[user]"
    assert writer.decode(writer.open_user_turn_ids("be brief", "How ")) == "[system]be brief<|endoftext|>[user]How"


@pytest.mark.parametrize("template", ["", "{{ messages[0].content | upper }}", "nothing"])
def test_templates_that_keep_no_dialog_are_refused(card: ModelCardData, template: str) -> None:
    with pytest.raises(InvalidRequestError, match="template"):
        DialogWriter(replace(card, chat_template=template))


@pytest.mark.parametrize("kind", KINDS)
def test_openings_are_repeatable_and_diverse(kind: str) -> None:
    first = [opening(kind, seed) for seed in range(200)]
    assert first == [opening(kind, seed) for seed in range(200)]
    assert len(set(first)) > 50
    if kind == "tools":
        assert all('"parameters"' in begun.system for begun in first)


def test_no_opening_holds_a_held_out_prompt() -> None:
    questions = {json.loads(line)["messages"][-1]["content"] for line in HELD_OUT.read_text().splitlines()}
    systems = {json.loads(line)["messages"][0]["content"][:60] for line in HELD_OUT.read_text().splitlines()}
    for kind in KINDS:
        for seed in range(500):
            begun = opening(kind, seed)
            assert begun.start not in questions
            assert begun.system[:60] not in systems


def test_held_out_prompts_are_complete() -> None:
    items = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    assert len({item["id"] for item in items}) == len(items) == 160
    for kind in KINDS:
        assert sum(item["kind"] == kind for item in items) == 40
    for item in items:
        assert item["source"]
        assert item["licence"] in ("Apache-2.0", "MIT")
        assert item["messages"][-1]["role"] == "user"
        assert all(message["content"].strip() for message in item["messages"])
