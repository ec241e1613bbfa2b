"""`graftline draft-head`: options reach the tool, results come out, bad input is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from graftline.cli_draft_head import app
from graftline.engine.draft_head.dialogs import DialogWriter
from graftline.engine.draft_head.prompt_overlap import prompt_overlap
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.errors import InvalidRequestError
from tests.engine.draft_head.conftest import PHRASES


def test_train_then_eval(tiny_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    trained = CliRunner().invoke(
        app,
        [
            *("train", "--model", str(tiny_target), "--out", str(out), "--device", "cpu", "--feature-layers", "0,1,-1"),
            *("--batches", "1", "--batch-dialogs", "8", "--dialog-len", "200", "--steps", "2", "--levels", "2"),
            *("--batch-rows", "4", "--draft-vocab", "150"),
        ],
        catch_exceptions=False,
    )
    assert trained.exit_code == 0, trained.output
    shared = CliRunner().invoke(
        app, ["overlap", "--work", str(out / "work"), "--model", str(tiny_target)], catch_exceptions=False
    )
    assert shared.exit_code == 0, shared.output
    assert "arithmetic" in shared.output
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    lines = [{"kind": kind, "messages": [{"role": "user", "content": PHRASES[0]}]} for kind in ("chat", "code")]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    measured = CliRunner().invoke(
        app,
        [
            *("eval", "--model", str(tiny_target), "--head", str(out), "--prompts", str(prompts), "--device", "cpu"),
            *("--max-new-tokens", "12", "--temperatures", "0", "--no-trees", "--kinds", "chat", "--json", str(figures)),
        ],
        catch_exceptions=False,
    )
    assert measured.exit_code == 0, measured.output
    assert "S5" in measured.output
    (greedy,) = json.loads(figures.read_text())
    assert set(greedy["kinds"]) == {"chat"}
    assert set(greedy["kinds"]["chat"]["accept_length"]) == {"S1", "S2", "S3", "S4", "S5"}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--device", "tpu"], "device"),
        (["--device", "cpu", "--dtype", "int8"], "dtype"),
        (["--device", "cpu", "--temperatures", "0,-1"], "temperatures"),
        (["--device", "cpu", "--temperatures", "warm"], "temperatures"),
        (["--device", "cpu", "--head", "nowhere"], "draft_head"),
        (["--device", "cpu"], "head"),
    ],
)
def test_bad_input_is_named(tiny_target: Path, arguments: list[str], field: str) -> None:
    result = CliRunner().invoke(app, ["eval", "--model", str(tiny_target), *arguments])
    assert isinstance(result.exception, InvalidRequestError)
    assert result.exception.field == field


def test_prompt_overlap_finds_what_a_dialog_holds(tiny_target: Path, tmp_path: Path) -> None:
    writer = DialogWriter(open_checkpoint(tiny_target).card)
    seen, unseen = "tell me about the old lighthouse", "what is seven times eleven"
    row = writer.prompt_ids([{"role": "user", "content": seen}])
    save_file({"tokens": torch.tensor([row], dtype=torch.int32)}, tmp_path / "dialogs-00000.safetensors")
    lines = [
        {"kind": kind, "messages": [{"role": "user", "content": text}]} for kind, text in (("a", seen), ("b", unseen))
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    assert prompt_overlap(tmp_path, tiny_target, prompts, 8) == {"a": [1.0], "b": [0.0]}
    with pytest.raises(InvalidRequestError, match="no dialogs"):
        prompt_overlap(tmp_path / "nowhere", tiny_target, prompts, 8)


def test_unusable_prompts_are_named(tiny_target: Path, tmp_path: Path) -> None:
    head = Path(__file__).parents[3] / "engine" / "draft_heads" / "smollm2-135m"
    result = CliRunner().invoke(app, ["eval", "--model", str(tiny_target), "--head", str(head), "--device", "cpu"])
    assert isinstance(result.exception, InvalidRequestError)
    assert "hidden size 576" in result.exception.problem
