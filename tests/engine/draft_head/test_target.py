"""The trainer's target against transformers, dense and step by step."""

from pathlib import Path

import pytest
import torch

from graftline.engine.draft_head.step_graphs import StepGraphs
from graftline.engine.draft_head.target import Target, TargetRunner
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.config import Family
from graftline.engine.models.random import write_tiny_model


@pytest.mark.parametrize("family", [Family.LLAMA, Family.QWEN2, Family.QWEN3])
def test_features_equal_those_of_transformers(tmp_path: Path, family: Family) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path / "m", layers=3, hidden=32, family=family)
    runner = TargetRunner(Target.load(open_checkpoint(folder), torch.device("cpu"), torch.float32), compiled=False)
    tokens = torch.randint(0, 250, (2, 13), generator=torch.Generator().manual_seed(0))
    hidden = runner.features(tokens, (0, 2, -1))
    with torch.no_grad():
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model(
            tokens, output_hidden_states=True
        )
    expected = [oracle.hidden_states[0], oracle.hidden_states[2], oracle.last_hidden_state]
    torch.testing.assert_close(hidden.features, torch.cat(expected, -1), atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(hidden.final, oracle.last_hidden_state, atol=2e-4, rtol=1e-3)


def test_filling_and_stepping_equal_one_dense_forward(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", layers=2, hidden=32, kv_heads=2)
    runner = TargetRunner(Target.load(open_checkpoint(folder), torch.device("cpu"), torch.float32), compiled=False)
    tokens = torch.randint(0, 250, (3, 12), generator=torch.Generator().manual_seed(1))
    dense = runner.features(tokens, (-1,)).final
    steps = StepGraphs(runner, 3, 12, captured=False)
    for rows in (slice(0, 2), slice(2, 3)):
        torch.testing.assert_close(steps.fill(tokens[rows, :5], rows), dense[rows, 4], atol=1e-4, rtol=1e-4)
    for position in range(5, 12):
        hidden = steps.step(tokens[:, position], position)
        torch.testing.assert_close(hidden, dense[:, position], atol=1e-4, rtol=1e-4)
