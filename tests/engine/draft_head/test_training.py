"""The whole tool on a tiny target: a trained head drafts well, an interrupted run goes on as if nothing was."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graftline.engine.draft_head.config import DraftHeadConfig, DraftHeadKind
from graftline.engine.draft_head.data import WritingOptions
from graftline.engine.draft_head.evaluation import EvalOptions, evaluate
from graftline.engine.draft_head.module import DraftHeadModule
from graftline.engine.draft_head.trainer import Progress, StepOptions, learning_rate_at
from graftline.engine.draft_head.training import TrainOptions, train
from graftline.engine.draft_head.weights import read_draft_head, write_draft_head
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.tree_shape import TreeShape
from graftline.errors import InvalidRequestError
from tests.engine.draft_head.conftest import PHRASES

STEPS = StepOptions(
    optimizer="adamw", learning_rate=5e-3, num_steps=100, warmup_steps=10, batch_rows=8, num_levels=3, loss_chunk=64
)


class Listener:
    """Hears a run; stops it by an exception at a step if told to."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.phases: list[str] = []
        self.batches = 0
        self.steps: list[int] = []
        self._stop_at = stop_at

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def dialogs_written(self, done: int, total: int) -> None:
        self.batches = done

    def stepped(self, progress: Progress) -> None:
        self.steps.append(progress.step)
        if progress.step == self._stop_at:
            raise InterruptedError


def options(model: Path, folder: Path, steps: StepOptions = STEPS) -> TrainOptions:
    return TrainOptions(
        model=model,
        out=folder / "head",
        work=folder / "work",
        feature_layers=(0, 1, -1),
        draft_vocab_size=200,
        kinds=("chat", "arithmetic"),
        num_batches=2,
        batch_dialogs=16,
        dialog_len=130,
        writing=WritingOptions(max_user_len=50, max_answer_len=60),
        steps=steps,
    )


def accept_lengths(model: Path, head: Path, folder: Path) -> dict[str, float]:
    lines = [{"kind": "chat", "messages": [{"role": "user", "content": phrase}]} for phrase in PHRASES]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    (figures,) = evaluate(
        EvalOptions(model, head, prompts, max_new_tokens=40, temperatures=(0.0,), shapes=(TreeShape(3, 2, 8),))
    )
    return {label: rounds.accept_length for label, rounds in figures.by_kind["chat"].by_shape.items()}


def test_training_raises_the_accept_length_clearly(tiny_target: Path, tmp_path: Path) -> None:
    listener = Listener()
    config = train(options(tiny_target, tmp_path), listener)
    assert listener.phases == ["reading the model", "writing dialogs", "training"]
    assert listener.batches == 2
    assert listener.steps[-1] == 100
    assert read_draft_head(tmp_path / "head")[0] == config
    trained = accept_lengths(tiny_target, tmp_path / "head", tmp_path)
    untrained_head = {name: value.detach() for name, value in DraftHeadModule(config, 3, seed=9).tensors().items()}
    write_draft_head(tmp_path / "untrained", config, untrained_head, torch.arange(200))
    untrained = accept_lengths(tiny_target, tmp_path / "untrained", tmp_path)
    assert untrained["S3"] < 1.15
    assert trained["S3"] > untrained["S3"] + 0.25
    assert trained["S1"] <= trained["S3"] <= trained["S5"]
    assert trained["S3 K2 V8"] > trained["S3"]


def test_an_interrupted_run_ends_with_the_same_head(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = replace(STEPS, num_steps=40, num_levels=2)
    train(options(tiny_target, tmp_path / "whole", steps), Listener())
    # Save at every report, so that the interruption at step 40 finds the state of step 20.
    monkeypatch.setattr("graftline.engine.draft_head.training._SAVE_EVERY_S", -1.0)
    with pytest.raises(InterruptedError):
        train(options(tiny_target, tmp_path / "broken", steps), Listener(stop_at=40))
    assert not (tmp_path / "broken" / "head").exists()
    resumed = Listener()
    train(options(tiny_target, tmp_path / "broken", steps), resumed)
    assert resumed.steps == [40]
    _, whole = read_draft_head(tmp_path / "whole" / "head")
    _, again = read_draft_head(tmp_path / "broken" / "head")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_working_folder_of_other_options_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    few = replace(STEPS, num_steps=2)
    train(options(tiny_target, tmp_path, few), Listener())
    with pytest.raises(InvalidRequestError, match="draft_vocab_size"):
        train(replace(options(tiny_target, tmp_path, few), draft_vocab_size=100), Listener())


def test_eagle_heads_train_and_share_the_whole_vocabulary(tiny_target: Path, tmp_path: Path) -> None:
    plan = replace(
        options(tiny_target, tmp_path, replace(STEPS, learning_rate=2e-3, num_steps=60)), kind=DraftHeadKind.EAGLE
    )
    listener = Listener()
    config: DraftHeadConfig = train(replace(plan, draft_vocab_size=10**6), listener)
    assert config.feature_layers == (-1,)
    assert not config.reduced_vocab
    assert "d2t" not in read_draft_head(tmp_path / "head")[1]
    assert accept_lengths(tiny_target, tmp_path / "head", tmp_path)["S1"] > 1.15


def test_a_head_of_another_target_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    config = train(options(tiny_target, tmp_path, replace(STEPS, num_steps=1)), Listener())
    tensors = read_draft_head(tmp_path / "head")[1]
    assert open_checkpoint(tiny_target).config.vocab_size == config.vocab_size
    other = replace(config, vocab_size=config.vocab_size + 1)
    (tmp_path / "head" / "config.json").write_text(other.to_json())
    with pytest.raises(InvalidRequestError, match="made for hidden size"):
        accept_lengths(tiny_target, tmp_path / "head", tmp_path)
    assert tensors


def test_learning_rate_warms_up_and_falls_to_its_final_share() -> None:
    plan = StepOptions(learning_rate=1.0, warmup_steps=10, final_share=0.1)
    assert learning_rate_at(plan, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate_at(plan, 50, 0.0) == pytest.approx(1.0)
    assert learning_rate_at(plan, 50, 0.5) == pytest.approx(0.55)
    assert learning_rate_at(plan, 50, 1.0) == pytest.approx(0.1)
