"""The measurements over two devices: their logic, with a tiny model on CPU and gloo in the place of NCCL."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graftline.bench import multi_gpu
from graftline.bench.gpu_configs import Setting
from graftline.bench.gpu_models import write_successor_pair
from graftline.bench.gpu_steps import Steps
from graftline.bench.gpu_transfer import PromptSizes, measure_handoffs, measure_writes
from graftline.bench.gpu_workers import worker_pair
from graftline.bench.multi_gpu import SECTIONS, Section, run_sections
from graftline.bench.multi_gpu_configs import TINY, decode_over, prefill_over
from graftline.bench.multi_gpu_load import Load
from graftline.bench.multi_gpu_parity import measure_parity
from graftline.bench.multi_gpu_speculation import CHAIN, Kind, measure_speculation, ratios
from graftline.bench.stage_use import Sign, stage_uses
from graftline.bench.steady_window import steady_window
from graftline.engine.config import StageChannel, StageMode
from graftline.engine.kv_pool import KvGeometry
from graftline.worker.options import CPU_TREE

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


REAL, ROOT_ONLY, PLAIN = Kind(2, CPU_TREE), Kind(2, CPU_TREE, real_tree=False), Kind(2, None)


def figures(tpot_ms: float, rate: float | None, window_tpot_ms: float | None) -> dict[str, Any]:
    return {"tpot_ms": tpot_ms, "mean_tpot_ms": tpot_ms, "tokens_per_s": rate, "window_tpot_ms": window_tpot_ms}


def test_ratios_need_both_figures() -> None:
    load = Load.small()
    found = {
        (REAL, load.short(1)): figures(4.0, 9.0, 3.0),
        (ROOT_ONLY, load.short(1)): figures(5.0, 8.0, 3.0),
        (PLAIN, load.short(1)): figures(10.0, 6.0, 10.0),
        (Kind(1, None), load.short(1)): figures(9.0, 4.0, 9.0),
        (REAL, load.steady(4)): figures(4.0, 9.0, 6.0),
        (PLAIN, load.steady(4)): figures(8.0, None, None),
        (Kind(1, CPU_TREE), load.steady(4)): figures(4.0, 4.5, 3.0),
        (Kind(2, CHAIN), load.steady(4)): figures(2.0, 9.0, 3.0),
    }
    assert dict(ratios(found, load, CPU_TREE)) == {
        "concurrency 1, 12 tokens: real tree over plain, TPOT of answers": 0.4,
        "concurrency 1, 12 tokens: real tree over plain, TPOT in the window": 0.3,
        "concurrency 1, 12 tokens: real tree over root-only, mean TPOT of answers": 0.8,
        "concurrency 1, 12 tokens: real tree over root-only, median TPOT of answers": 0.8,
        "concurrency 1, 12 tokens: 2 stages over 1, plain, tokens a second": 1.5,
        "concurrency 4, 48 tokens, decoding together: real tree over plain, TPOT of answers": 0.5,
        "concurrency 4, 48 tokens, decoding together: EAGLE S5 K1 V6 over plain, TPOT of answers": 0.25,
        "concurrency 4, 48 tokens, decoding together: EAGLE S5 K1 V6 over S3 K1 V4, TPOT in the window": 0.5,
        "concurrency 4, 48 tokens, decoding together: 2 stages over 1, real tree, tokens a second": 2.0,
    }


LOADS = (Load.of_gpu(1024), Load.of_long_prompts(16384), Load.of_texts(512, ()), Load.small())


@pytest.mark.parametrize("load", LOADS)
def test_loads_fit_their_pools(load: Load) -> None:
    for ask in load.asks():
        each = -(-(load.prompt_len + ask.tokens + 16) // load.page_size)
        assert ask.concurrency * each <= load.num_pages
        for group in load.groups(ask, 30000):
            assert len(group) == ask.concurrency
            assert all(len(prompt) == load.prompt_len for prompt in group)
            assert all(0 <= token < 30000 for prompt in group for token in prompt)
        if load.prefill_pages:
            own = -(-load.own_tokens // load.page_size) + 1
            assert -(-load.prompt_len // load.page_size) + ask.concurrency * own <= load.prefill_pages


@pytest.mark.parametrize("load", LOADS)
def test_prompts_differ_and_are_the_same_for_every_pair(load: Load) -> None:
    for ask in load.asks():
        groups = load.groups(ask, 30000)
        prompts = [tuple(prompt) for group in groups for prompt in group]
        assert len(set(prompts)) == len(prompts)
        assert len({prompt[-1] for prompt in prompts}) == len(prompts)
        assert load.groups(ask, 30000) == groups
    if load.num_prompts > 2:
        assert all(len(load.groups(load.short(count), 30000)) * count >= 8 for count in (1, 2))


def test_long_prompts_share_all_but_their_ends() -> None:
    load = Load.of_long_prompts(16384)
    first, second = load.groups(load.short(1), 30000)[0][0], load.groups(load.short(1), 30000)[1][0]
    assert first[:-64] == second[:-64]
    assert all(a != b for a, b in zip(first[-64:], second[-64:], strict=True))


def test_rates_of_crowds_come_from_long_answers() -> None:
    load = Load.of_gpu(1024)
    assert load.steady(32).together
    assert load.steady(32).tokens == 512
    assert load.steady(2) == load.short(2)
    assert not load.short(32).together
    assert len(load.asks()) == 6
    assert load.needs_s(load.steady(32)) > load.needs_s(load.short(32)) > 3.0


def test_prompts_of_text_are_cut_and_taken_in_turn() -> None:
    load = Load.of_texts(3, texts=[[5, 6, 7, 8], [9]])
    assert load.groups(load.short(2), 300)[0] == [[5, 6, 7], [9]]


def test_more_stages_are_compared_with_one() -> None:
    load = Load.small()
    found = {
        (Kind(4, CPU_TREE), load.steady(4)): figures(4.0, 9.0, 3.0),
        (Kind(4, None), load.steady(4)): figures(10.0, 6.0, 10.0),
        (Kind(1, None), load.steady(4)): figures(9.0, 4.0, 9.0),
    }
    start = "concurrency 4, 48 tokens, decoding together: 4 stages"
    assert dict(ratios(found, load, CPU_TREE)) == {
        f"{start}: real tree over plain, TPOT of answers": 0.4,
        f"{start}: real tree over plain, TPOT in the window": 0.3,
        f"{start} over 1, plain, tokens a second": 1.5,
    }


@pytest.mark.slow
@pytest.mark.system
def test_a_prefill_has_a_device_of_its_own_where_there_is_one(tmp_path: Path, steps: Steps) -> None:
    """Three devices: two stages of decode on the last two, and then three, the first beside the prefill."""
    model, head = write_successor_pair(tmp_path, 0.8, TINY)
    devices = ("cpu",) * 3
    load = replace(Load.small(), concurrencies=(1,))
    measure_speculation(steps, "tiny", model, head, devices, load, CPU_TREE, ["eagle2", "plain3"])
    no_errors(steps)
    assert steps.found["tiny, 2 stages EAGLE S3 K1 V4"]["prefill"] == "cpu, nobody beside it"
    assert steps.found["tiny, 3 stages plain"]["prefill"] == "cpu, a stage beside it"
    assert len(steps.found["tiny, 3 stages plain"]["layers"]) == 3


def test_what_does_not_fit_into_the_time_is_not_begun(tmp_path: Path) -> None:
    model, head = write_successor_pair(tmp_path, 0.8, TINY)
    steps = Steps(tmp_path / "steps.json", 1.0)
    measure_speculation(steps, "tiny", model, head, CPUS, Load.small(), CPU_TREE)
    skipped = [name for name, value in steps.found.items() if isinstance(value, dict) and "skipped" in value]
    assert skipped == [
        "tiny, 2 stages EAGLE S3 K1 V4",
        "tiny, 2 stages plain",
        "tiny, 1 stages plain",
        "tiny, 1 stages EAGLE S3 K1 V4",
        "tiny, 2 stages EAGLE S5 K1 V6",
    ]
    assert steps.found["tiny, ratios"] == {}


def test_pairs_come_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    model, head = write_successor_pair(tmp_path, 0.8, TINY)
    steps = Steps(tmp_path / "steps.json", 1.0)
    measure_speculation(steps, "tiny", model, head, CPUS, Load.small(), CPU_TREE, ["plain1", "eagle2"])
    skipped = [name for name, value in steps.found.items() if isinstance(value, dict) and "skipped" in value]
    assert skipped == ["tiny, 1 stages plain", "tiny, 2 stages EAGLE S3 K1 V4"]


@pytest.mark.slow
@pytest.mark.system
def test_requests_that_decode_together_have_a_window(tmp_path: Path, steps: Steps) -> None:
    """Real workers: nobody's first round ends before the last one's KV has come, and stages are seen at work."""
    model, head = write_successor_pair(tmp_path, 0.8, TINY)
    setting = Setting(model, head, "cpu", "float32", num_pages=64, max_running=4, chunk_tokens=32, threads=1)
    prompts = [[5 + row, 6, 7] for row in range(4)]
    signs: list[Sign] = []
    engines = prefill_over(setting, None, CPUS[:1]), decode_over(setting, None, CPUS)
    with worker_pair(*engines) as pair, pair.decode.watched(signs):
        answers = pair.run(prompts, 150, together=True)
    assert [len(answer.ids) for answer in answers] == [150] * 4
    last_s = max(answer.handoff.finished_s for answer in answers)
    assert all(last_s <= answer.started_s <= answer.arrivals[1][0] for answer in answers)
    window = steady_window(answers)
    assert window is not None
    assert window.begin_s > last_s
    uses = stage_uses(signs, [(window.begin_s, window.end_s)])
    assert [use.stage for use in uses] == [0, 1]
    assert all(0 < use.busy < 1.2 and use.steps > 10 for use in uses)


def test_sections_run_in_order_within_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, float]] = []
    told: list[str] = []

    def run_bounded(command: list[str], part: Path, seconds: float) -> dict[str, Any]:
        ran.append((command[command.index("--section") + 1], seconds))
        told[:] = command[-4:]
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
    options = ["--pairs", "plain1,eagle2", "--share", "0.9"]
    run_sections(["large"], out, 60.0, "", "cpu", options)
    assert told == options


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--sections", "nonsense"], "no section 'nonsense'"),
        (["--pairs", "plain2,plainly3"], "no pair 'plainly3'"),
        (["--pairs", "plain2,plain3"], "plain3 on 2 GPUs"),
        (["--gpus", "1"], "--gpus: 1 is outside"),
        (["--share", "1.5"], "--share: 1.5 is outside"),
    ],
)
def test_says_what_there_is_none_of(
    words: list[str], answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["multi_gpu", "--out", str(tmp_path / "out.json"), *words])
    with pytest.raises(SystemExit):
        multi_gpu.main()
    assert answer in capsys.readouterr().err
