"""The command on clusters of its own: real processes, a tiny model, a head whose drafts are always right."""

import json
from pathlib import Path

import pytest
from tiny_world import TinyWorld, prompt
from typer.testing import CliRunner

from graftline.bench.cli import app
from graftline.bench.processes import descendants
from graftline.bench.records import read_result

pytestmark = pytest.mark.system

DEPTH = 3


def test_a_real_tree_is_seen_to_pay_and_changes_no_output(tmp_path: Path) -> None:
    world = TinyWorld(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": prompt(20, seed)}) + "\n" for seed in range(4)))
    output = tmp_path / "r.json"
    settings = f"draft_head:{world.agrees},draft_depth:{DEPTH},dtype:float32,threads:1,metrics:off,pages:64"
    before = descendants()
    # 1 token from the prefill; then 4 a round, but for a cold first round of 1.
    arguments = ["--model", world.markov.path, "--cluster", settings, "--prompts", prompts, "--max-tokens", 13]
    arguments += ["--compare", "--variant", "root-only=initial_tree:root-only", "--variant", "real=initial_tree:real"]
    arguments += ["--variant", "plain=baseline:plain-loop,threads:1", "--num-requests", 2, "--warmup", 1]
    arguments += ["--ignore-eos", "--output", output]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert descendants() <= before, "nothing is left running"

    result = read_result(output)
    root_only, real, plain = result.summaries
    assert [summary.num_failed for summary in result.summaries] == [0, 0, 0]
    assert (root_only.tree_origins, real.tree_origins) == ({"root-only": 2}, {"real": 2})
    assert root_only.figures["first_round_accept_length"] == 1
    assert real.figures["first_round_accept_length"] == DEPTH + 1
    assert (root_only.figures["rounds_mean"], real.figures["rounds_mean"]) == (4, 3)
    assert real.figures["accept_length"] == DEPTH + 1
    assert real.figures["kv_bytes_mean"] > 0
    assert real.figures["cores_used"] > 0
    assert "accept_length" not in plain.figures
    assert {entry.variant: (entry.num_same, entry.num_compared) for entry in result.same_outputs} == {
        "real": (2, 2),
        "plain": (2, 2),
    }
