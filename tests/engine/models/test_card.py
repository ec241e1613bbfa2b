"""Model cards of Hugging Face directories."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from graftline.engine.models.card import ModelCardData
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.random import CHAT_TEMPLATE, write_tiny_model
from graftline.errors import InvalidRequestError


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def settings(path: Path, **changes: Any) -> ModelCardData:
    """The card after changes to tokenizer_config.json."""
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return open_checkpoint(path).card


def test_plain_values(tiny: Path) -> None:
    card = open_checkpoint(tiny).card
    assert card.tokenizer_json == (tiny / "tokenizer.json").read_bytes()
    assert (card.model_id, card.vocab_size, card.context_length) == ("tiny", 259, 512)
    assert (card.bos_token_id, card.eos_token_ids, card.chat_template) == (-1, (258,), CHAT_TEMPLATE)
    assert card.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def test_where_a_template_is_found(tiny: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert settings(tiny, chat_template=named).chat_template == "yes"
    assert settings(tiny, chat_template=None).chat_template == ""
    (tiny / "chat_template.jinja").write_text("own file")
    assert settings(tiny, chat_template="other").chat_template == "own file"


def test_special_tokens_in_either_form_and_file(tiny: Path) -> None:
    (tiny / "special_tokens_map.json").write_text('{"pad_token": {"content": "<pad>"}, "eos_token": "old"}')
    card = settings(tiny, bos_token={"content": "<s>", "special": True}, unk_token=None, split_special_tokens=False)
    assert card.special_tokens == {"pad_token": "<pad>", "eos_token": "<|im_end|>", "bos_token": "<s>"}


def test_a_leading_bos_is_found(tiny: Path) -> None:
    """CASES I57: whoever adds it, and in whichever form it is written."""
    assert settings(tiny, add_bos_token=False).bos_token_id == -1
    assert settings(tiny, add_bos_token=True).bos_token_id == 256
    written = {"__type": "AddedToken", "content": "<|im_start|>", "special": True}
    assert settings(tiny, bos_token=written).bos_token_id == 257, "as tokenizers write tokens with properties"
    assert settings(tiny, add_bos_token=False).bos_token_id == -1
    content = json.loads((tiny / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [257], "tokens": ["<|im_start|>"]}},
    }
    (tiny / "tokenizer.json").write_text(json.dumps(content))
    assert open_checkpoint(tiny).card.bos_token_id == 257


def test_hash_follows_everything_but_the_name(tiny: Path) -> None:
    card = open_checkpoint(tiny).card
    assert dataclasses.replace(card, model_id="other").card_hash == card.card_hash
    changes: list[dict[str, Any]] = [
        {"tokenizer_json": b"{}"},
        {"chat_template": ""},
        {"bos_token_id": 1},
        {"eos_token_ids": (1, 2)},
        {"context_length": 8},
        {"vocab_size": 8},
        {"special_tokens": {}},
    ]
    hashes = {dataclasses.replace(card, **change).card_hash for change in changes}
    assert len(hashes | {card.card_hash}) == len(changes) + 1


@pytest.mark.parametrize(("content", "says"), [(None, "cannot read"), ("{}", r"tokenizer\.json cannot be used")])
def test_no_tokenizer(content: str | None, says: str, tiny: Path) -> None:
    (tiny / "tokenizer.json").unlink()
    if content is not None:
        (tiny / "tokenizer.json").write_text(content)
    checkpoint = open_checkpoint(tiny)
    with pytest.raises(InvalidRequestError, match=says):
        _ = checkpoint.card


def test_the_card_s_tokenizer_loads(tiny: Path) -> None:
    tokenizer = Tokenizer.from_buffer(open_checkpoint(tiny).card.tokenizer_json)
    assert tokenizer.get_vocab_size() == 259
