"""The measurements over two devices: their logic, with a tiny model on CPU and gloo in the place of NCCL."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graftline.bench import multi_gpu
from graftline.bench.gpu_configs import Setting
from graftline.bench.gpu_models import write_successor_pair
from graftline.bench.gpu_steps import Steps
from graftline.bench.gpu_transfer import PromptSizes, measure_handoffs, measure_writes
from graftline.bench.gpu_workers import Handoff, PairAnswer
from graftline.bench.multi_gpu import SECTIONS, Section, run_sections
from graftline.bench.multi_gpu_configs import TINY, decode_over
from graftline.bench.multi_gpu_parity import measure_parity
from graftline.bench.multi_gpu_speculation import Load, _ratios, steady_rate
from graftline.engine.config import StageChannel, StageMode
from graftline.engine.kv_pool import KvGeometry

CPUS = ("cpu", "cpu")


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path / "steps.json", 300.0)


def no_errors(steps: Steps) -> None:
    assert [value for value in steps.found.values() if isinstance(value, dict) and "error" in value] == []


@pytest.mark.slow
@pytest.mark.system
def test_workers_of_several_processes_answer_as_the_plain_model(tmp_path: Path, steps: Steps) -> None:
    """Prefill and decode in processes of their own, two stages each, KV through Mooncake: DESIGN contract 1."""
    model, head = write_successor_pair(tmp_path, 0.8, TINY)
    measure_parity(steps, model, head, CPUS, num_prompts=3, max_tokens=12)
    no_errors(steps)
    for stages in (1, 2):
        found = steps.found[f"prefill stages {stages}, decode stages 2"]
        assert [found[f"concurrency {count}"]["equal"] for count in (8, 1)] == [3, 3]
        assert found["accept length at concurrency 1"] > 1


@pytest.mark.slow
@pytest.mark.system
def test_writes_and_handoffs_are_measured(tmp_path: Path, steps: Steps) -> None:
    geometry = KvGeometry(2, 4, 2, 16, torch.float32)
    measure_writes(steps, ("cpu",), (1,), geometry)
    assert steps.found["bytes arrived"] is True
    assert steps.found["1 MiB, order"]["gb_per_s"] > 0
    model, _ = write_successor_pair(tmp_path, 0.8, TINY)
    measure_handoffs(steps, model, ("cpu",), PromptSizes((48,), 16, 1), "float32")
    found = steps.found["handoff of 48 tokens"]
    assert found["bytes"] == 48 * 4 * 2 * 2 * 16 * 4
    assert 0 <= found["hidden"] <= 1
    no_errors(steps)


def test_configurations_put_a_stage_on_every_device(tmp_path: Path) -> None:
    model, head = write_successor_pair(tmp_path, 0.8, TINY)
    config = decode_over(Setting(model, head, "cuda:0"), None, ("cuda:0", "cuda:1"))
    assert config.devices == ("cuda:0", "cuda:1")
    assert (config.stage_mode, config.stage_channel) == (StageMode.PROCESSES, StageChannel.DIRECT)
    assert config.layer_split == (2, 2)
    assert config.device_rounds
    assert not decode_over(Setting(model, head, "cpu"), None, CPUS, (1, 3)).device_rounds


def answer(*arrivals: tuple[float, int]) -> PairAnswer:
    return PairAnswer(0.0, arrivals=list(arrivals), handoff=Handoff())


def test_a_steady_rate_counts_while_all_decode() -> None:
    together = [answer((0.0, 1), (1.0, 2), (3.0, 2)), answer((1.0, 1), (2.0, 4), (4.0, 4))]
    assert steady_rate(together) == pytest.approx((2 + 4) / 2.0)
    apart = [answer((0.0, 1), (1.0, 1)), answer((2.0, 1), (3.0, 1))]
    assert steady_rate(apart) == pytest.approx(3 / 3.0)
    assert steady_rate([answer((1.0, 1))]) == 0.0


def test_ratios_need_both_figures() -> None:
    found = {
        ("2 stages real tree", 1): {"tpot_ms": 4.0, "tokens_per_s": 9.0},
        ("2 stages plain", 1): {"tpot_ms": 10.0, "tokens_per_s": 6.0},
        ("1 stages plain", 1): {"tpot_ms": 9.0, "tokens_per_s": 4.0},
        ("2 stages real tree", 8): {"tpot_ms": 4.0, "tokens_per_s": 9.0},
    }
    assert dict(_ratios(found, (1, 8))) == {
        "concurrency 1: real tree over plain, TPOT": 0.4,
        "concurrency 1: 2 stages over 1, tokens a second": 1.5,
    }


def test_loads_fit_their_pools() -> None:
    for load in (Load.of_gpu(1024), Load.of_long_prompts(16384), Load.small()):
        most = max(load.concurrencies)
        each = -(-(load.prompt_len + load.tokens_at(most) + 8) // load.page_size)
        assert most * each <= load.num_pages
        prompts = load.prompts(most, 30000)
        assert len({tuple(prompt) for prompt in prompts}) == most
        assert all(0 <= token < 30000 for prompt in prompts for token in prompt)


def test_prompts_of_text_are_cut_and_taken_in_turn() -> None:
    load = Load.of_gpu(3, texts=[[5, 6, 7, 8], [9]])
    assert load.prompts(3, 300) == [[5, 6, 7], [9], [5, 6, 7]]


def test_sections_run_in_order_within_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, float]] = []

    def run_bounded(command: list[str], part: Path, seconds: float) -> dict[str, Any]:
        ran.append((command[command.index("--section") + 1], seconds))
        return {"found": {"step": {"error": "no"}}, "ending": "exit code 0", "output": []}

    monkeypatch.setattr(multi_gpu, "run_bounded", run_bounded)
    monkeypatch.setitem(SECTIONS, "parity", Section(20.0, SECTIONS["parity"].run))
    out = tmp_path / "out" / "multi.json"
    found = run_sections(["parity", "handoff"], out, 60.0, "", "cpu")
    assert [name for name, _ in ran] == ["parity", "handoff"]
    assert ran[0][1] == 20.0
    assert ran[1][1] <= 60.0
    assert json.loads(out.read_text())["sections"] == found["sections"]
    assert run_sections(["parity"], out, 5.0, "", "cpu")["sections"]["parity"]["ending"].startswith("not begun")
    monkeypatch.setattr(sys, "argv", ["multi_gpu", "--out", str(out), "--sections", "nonsense"])
    with pytest.raises(SystemExit):
        multi_gpu.main()
