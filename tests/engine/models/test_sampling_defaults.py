"""What generation_config.json says of sampling."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.random import write_tiny_model
from graftline.engine.models.sampling_defaults import SamplingDefaults, sampling_defaults
from graftline.errors import InvalidRequestError
from graftline.worker.facts import card_message


def test_values_are_read_and_what_is_not_said_stays_open(caplog: pytest.LogCaptureFixture) -> None:
    """CASES I59: with what cannot be done named in the log."""
    assert sampling_defaults({"eos_token_id": 1, "do_sample": True, "top_p": None}) == SamplingDefaults()
    found = sampling_defaults({"temperature": 1, "top_k": 20, "top_p": 0.8, "min_p": 0.0, "repetition_penalty": 1.0})
    assert found == SamplingDefaults(1.0, 20, 0.8, 0.0)
    assert sampling_defaults({"top_k": -1, "temperature": 0}) == SamplingDefaults(0.0, 0)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        sampling_defaults({"repetition_penalty": 1.1})
    assert "repetition_penalty 1.1 is not supported" in caplog.text


@pytest.mark.parametrize(
    "value",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"top_k": -2},
        {"min_p": True},
    ],
)
def test_a_value_that_no_request_could_have_is_refused_by_name(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=rf"generation_config\.json: {next(iter(value))}"):
        sampling_defaults(value)


def test_the_card_carries_them(tmp_path: Path) -> None:
    """CASES I59."""
    tiny = write_tiny_model(tmp_path / "tiny")
    plain = open_checkpoint(tiny).card
    assert plain.sampling == SamplingDefaults()
    assert not card_message(plain, with_text=False).sampling_defaults.ListFields()
    file = tiny / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 0.6, "top_k": 20}))
    card = open_checkpoint(tiny).card
    message = card_message(card, with_text=False).sampling_defaults
    assert {field.name: value for field, value in message.ListFields()} == {
        "temperature": pytest.approx(0.6),
        "top_k": 20,
    }
    assert replace(card, sampling=SamplingDefaults()).card_hash == plain.card_hash != card.card_hash
