"""What the sections measure, with tiny models on CPU: the logic, not the figures."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_world import TinyWorld, prompt

from graftline.bench import gpu_attention, gpu_parity, gpu_speculation, multi_gpu_configs
from graftline.bench.gpu_configs import CHAIN, Setting, shape_name
from graftline.bench.gpu_drafter import measure_drafter, with_measured_lengths
from graftline.bench.gpu_models import LLAMA_8B, write_dummy_model, write_successor_pair
from graftline.bench.gpu_pair import PoolMemory, engine_pair
from graftline.bench.gpu_parity import CASES, SHIPPED_IDS, Case, ids_file, measure_parity, shipped_ids
from graftline.bench.gpu_roofline import measure_roofline, prompt_flops, step_bytes
from graftline.bench.gpu_speculation import measure_speculation
from graftline.bench.gpu_stage import StageAlone
from graftline.bench.gpu_steps import Steps
from graftline.bench.gpu_transformers import equal_prompts
from graftline.engine.models.checkpoint import open_checkpoint, read_model_config
from graftline.engine.models.config import config_from_dict
from graftline.engine.models.dummy_checkpoint import DummyCheckpoint, DummyWeights, successor
from graftline.engine.models.load import load_model
from graftline.engine.models.reference import greedy
from graftline.engine.tree_shape import TreeShape
from graftline.errors import InvalidRequestError

TINY: dict[str, Any] = {**multi_gpu_configs.TINY, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("bench-world"))


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    """Steps none of which may fail."""
    made = Steps(tmp_path / "steps.json", 300.0)
    yield made
    errors = {name: value for name, value in made.found.items() if isinstance(value, dict) and "error" in value}
    assert errors == {}


# --- models without weights -------------------------------------------------------------------------------------------


def test_drafts_of_the_simulated_head_are_right_as_often_as_stated(tmp_path: Path) -> None:
    model, head = write_successor_pair(tmp_path, 0.7, TINY)
    setting = Setting(model, head, "cpu", "float32", num_pages=256, max_running=2, threads=1)
    follows = successor(300, 0).tolist()
    prompts = [[5, 9], [17, 3], [200, 201], [11, 250]]
    with engine_pair(setting.prefill(CHAIN), setting.decode(CHAIN, device_rounds=False)) as pair:
        answers = pair.run(prompts, 100)
    for question, answer in zip(prompts, answers, strict=True):
        last = question[-1]
        for token in answer.ids:
            assert token == follows[last]
            last = token
        assert sum(count for _, count in answer.arrivals) == len(answer.ids) == 100
    rounds = sum(answer.speculation.rounds for answer in answers)
    accepted = sum(answer.speculation.accepted for answer in answers)
    assert accepted / rounds == pytest.approx(0.7 + 0.7**2 + 0.7**3, abs=0.3)


def test_dummy_weights_are_the_same_whenever_asked_for(tmp_path: Path) -> None:
    path = write_dummy_model(tmp_path / "a", TINY)
    first, second = open_checkpoint(path), open_checkpoint(path)
    assert isinstance(first, DummyCheckpoint)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first.tensor(name), second.tensor(name))
    assert not torch.equal(first.tensor(name), first.tensor("model.layers.0.mlp.up_proj.weight"))
    assert first.tensor("model.norm.weight").eq(1).all()
    other = open_checkpoint(write_dummy_model(tmp_path / "b", TINY, DummyWeights(seed=1)))
    assert first.model_hash == second.model_hash != other.model_hash
    assert not first.has_tensor("model.layers.2.mlp.up_proj.weight")
    with pytest.raises(InvalidRequestError, match=r"no tensor model\.layers\.2"):
        first.tensor("model.layers.2.input_layernorm.weight")
    with torch.inference_mode():
        ids = greedy(load_model(first, range(2), torch.float32), [1, 2, 3], 12)
    assert len(set(ids)) > 1


def test_a_broken_dummy_file_is_named(tmp_path: Path) -> None:
    path = write_dummy_model(tmp_path / "a", TINY)
    (path / "dummy.json").write_text("{")
    with pytest.raises(InvalidRequestError, match=r"dummy\.json"):
        open_checkpoint(path)


# --- one stage, roofline ----------------------------------------------------------------------------------------------


def test_bytes_and_operations_of_the_8b_shapes() -> None:
    model = config_from_dict(dict(LLAMA_8B), {})
    weights = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336) + 128256 * 4096
    assert step_bytes(model, 1, 0) == 2 * weights == 15_009_316_864
    assert step_bytes(model, 3, 1000) - 2 * weights == 3 * 1000 * 32 * 2 * 8 * 128 * 2
    layers = weights - 128256 * 4096
    assert prompt_flops(model, 1) == pytest.approx(2 * weights, rel=1e-4)
    assert prompt_flops(model, 4096) == pytest.approx(2 * layers * 4096 + 4096**2 * 2 * 4096 * 32, rel=1e-3)


@pytest.mark.parametrize("tree", [None, TreeShape(4, 2, 8)])
def test_a_stage_alone_decodes_alike_with_and_without_fixed_shapes(world: TinyWorld, tree: TreeShape | None) -> None:
    setting = Setting(world.plain.path, world.eagle, "cpu", "float32", num_pages=32, max_running=3, threads=1)
    heard = []
    for device_rounds in (False, True):
        torch.manual_seed(0)  # of the random past
        stage = StageAlone(setting.decode(tree, device_rounds=device_rounds))
        stage.open(2, 33, 100, tokens=(7, 8))
        times = [stage.rounds(3), stage.rounds(2)]
        assert [time.batch for time in times] == [2, 2]
        assert times[0].context == 33
        assert times[1].context >= 36
        assert all(time.emitted >= 1 for time in times)
        heard.append([[outcome.ids for outcome in stage._outcomes(result)] for result in stage._heard.results])
    assert len(heard[0]) == 5
    assert heard[0] == heard[1]


@pytest.mark.slow
def test_roofline_notes_rates_steps_prompts_and_profiles(tmp_path: Path, steps: Steps) -> None:
    path = write_dummy_model(tmp_path / "model", TINY)
    measure_roofline(steps, path, "cpu", batches=(1, 2), contexts=(32,), prompt_tokens=64, rounds=2, dtype="float32")
    found = steps.found
    for batch in (1, 2):
        step = found[f"decode, context 32, batch {batch}"]
        assert step["bytes"] == step_bytes(read_model_config(path), batch, 32)
        assert step["share_of_copy_rate"] == pytest.approx(step["bytes"] / found["copy bytes/s"] / step["wall_s"])
        assert step["emitted"] == 1
    assert found["prefill, 64 tokens by 32"]["tokens/s"] > 0
    assert found["prefill, 32 tokens"]["seconds"] > 0
    assert found["prefill stage"] == found["decode stage"] == {"attention of planned steps": "torch"}
    profile = found["profile of 4 rounds, context 32, batch 1"]
    assert profile
    assert sum(row["share"] for row in profile) <= 1.001


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_parity_says_who_is_equal_and_where_others_part(
    world: TinyWorld, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = (Case(CHAIN), Case(TreeShape(4, 2, 8), rounds=False, together=False), Case(CHAIN, stages=2, overlap=False))
    monkeypatch.setattr(gpu_parity, "CASES", cases)
    measure_parity(steps, world.plain.path, world.eagle, "cpu", num_prompts=2, max_tokens=8)
    for case in cases:
        found = steps.found[case.name]
        assert (found["prompts"], found["equal"], found["differing"]) == (2, 2, [])
        assert found["accept_length"] >= 1
    checkpoint = open_checkpoint(world.plain.path)
    prompts = gpu_parity.parity_prompts(checkpoint, 1)
    wrong = [gpu_parity.cpu_ids(checkpoint, prompts, 6)[0]]
    wrong[0][3] = (wrong[0][3] + 1) % 256
    setting = Setting(world.plain.path, None, "cpu", "float32", num_pages=256, threads=1)
    found = gpu_parity.run_case(Case(None), setting, checkpoint, prompts, wrong)
    (parting,) = found["differing"]
    assert (found["equal"], parting["at"], parting["expected"]) == (0, 3, wrong[0][3])
    assert parting["margin"] < 0  # the CPU prefers what was actually said


def test_cases_cover_what_must_agree() -> None:
    assert {(case.graphs, case.overlap) for case in CASES if case.rounds} == {
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    }
    assert {case.stages for case in CASES} == {1, 2}
    assert {case.rounds for case in CASES} == {True, False}
    assert len({case.name for case in CASES}) == len(CASES)


def test_shipped_ids_are_taken_for_their_model_and_prompts_alone(
    world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(world.plain.path)
    file = tmp_path / "ids.json"
    monkeypatch.setattr(gpu_parity, "SHIPPED_IDS", file)
    prompts = [[1, 2], [3]]
    assert shipped_ids(checkpoint, prompts, 2) is None
    file.write_text(ids_file(checkpoint.model_hash, prompts, [[4, 5, 6], [7, 8, 9]]))
    assert shipped_ids(checkpoint, [[3]], 2) == [[7, 8]]
    assert shipped_ids(checkpoint, prompts, 4) is None
    assert shipped_ids(checkpoint, [[9]], 2) is None
    file.write_text(ids_file("another", prompts, [[4, 5, 6], [7, 8, 9]]))
    assert shipped_ids(checkpoint, prompts, 2) is None


def test_the_shipped_file_has_enough_prompts_of_one_length_of_answer() -> None:
    shipped = json.loads(SHIPPED_IDS.read_text())
    assert len(shipped["prompts"]) == len(shipped["ids"]) == gpu_parity.NUM_PROMPTS
    assert {len(ids) for ids in shipped["ids"]} == {gpu_parity.MAX_TOKENS}


@pytest.mark.slow
def test_speculation_is_measured_by_pipeline_tree_and_overlap(
    world: TinyWorld, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_speculation, "_REPEATS", 1)
    monkeypatch.setattr(gpu_speculation, "_DEVICE_ROUNDS", 3)
    setting = Setting(world.markov.path, world.agrees, "cpu", "float32", num_pages=64, max_running=1, threads=1)
    measure_speculation(steps, "tiny", setting, [prompt(20)], output_tokens=10, stages=(1,))
    found = steps.found[f"tiny, 1 stages, {shape_name(CHAIN)}, overlap off"]
    assert found["real tree"]["first_round_accepted"] == 3
    assert found["root-only"]["first_round_accepted"] == 0
    assert found["real tree"]["accept_length"] > 2
    assert steps.found["tiny, 1 stages, plain, overlap on"]["plain"]["tpot_ms"] > 0
    ratio = steps.found["tiny, ratios"]["1 stages, overlap off: real tree over root-only"]
    assert ratio == pytest.approx(found["real tree"]["tpot_ms"] / found["root-only"]["tpot_ms"])
    assert set(steps.found["tiny, host time"]) == {"plain", "real tree"}


@pytest.mark.slow
def test_the_drafter_is_measured_by_shape(world: TinyWorld, steps: Steps) -> None:
    setting = Setting(world.plain.path, world.eagle, "cpu", "float32", threads=1)
    shapes = (CHAIN, TreeShape(4, 2, 8))
    measure_drafter(steps, setting, shapes, context=32, rounds=2, accept_lengths={shape_name(CHAIN): 2.0})
    chain, tree = (steps.found[shape_name(shape)] for shape in shapes)
    assert chain["tokens/s"] == pytest.approx(2000 / chain["round_ms"])
    assert chain["over plain"] == pytest.approx(2 * chain["plain_round_ms"] / chain["round_ms"])
    assert min(chain["growth_ms"], chain["verify_ms"], tree["growth_ms"]) > 0
    assert "tokens/s" not in tree
    lengths = {kind: {"accept_length": {"S3": s3, "S4 K2 V8": 4.0}} for kind, s3 in (("chat", 2.0), ("code", 3.0))}
    speeds = with_measured_lengths(steps.found, [{"temperature": 0.0, "kinds": lengths}])
    assert set(speeds) == {"prompts", "temperature", shape_name(CHAIN), "S4 K2 V8"}
    assert speeds[shape_name(CHAIN)]["accept_length"] == 2.5
    assert speeds["S4 K2 V8"]["tokens/s"] == pytest.approx(4000 / tree["round_ms"])


def test_attention_is_compared_case_by_case(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    small = (("a chunk and a tree", ((17, 5, None), (3, 4, (-1, 0, 0, 1)))),)
    monkeypatch.setattr(gpu_attention, "CASES", small)
    gpu_attention.measure_attention(steps, "cpu", ((4, 2, 16),))
    found = steps.found["attention, torch, 4 heads, 2 KV heads of 16"]["a chunk and a tree"]
    assert found["largest_error"] < 1e-5
    assert found["ms"] > 0


def test_prompts_of_a_batch_have_one_length(world: TinyWorld, tmp_path: Path) -> None:
    prompts = equal_prompts(open_checkpoint(world.plain.path), 3, 20)
    assert [len(row) for row in prompts] == [20, 20, 20]
    assert len({tuple(row) for row in prompts}) == 3
    numbers = equal_prompts(open_checkpoint(write_dummy_model(tmp_path / "model", TINY)), 2, 5)
    assert len({tuple(row) for row in numbers}) == 2


def test_copies_find_their_pools_by_address() -> None:
    memory = PoolMemory()
    pools = [torch.zeros(4, 3), torch.arange(10, dtype=torch.float32), torch.zeros(2, dtype=torch.bfloat16)]
    for pool in pools:
        memory.add(pool)
    memory.copy(pools[0].data_ptr() + 8, pools[1].data_ptr() + 4, 12)
    assert pools[0].flatten().tolist() == [0, 0, 1, 2, 3, *[0] * 7]
    with pytest.raises(AssertionError, match="lie in no pool"):
        memory.copy(pools[0].data_ptr() + 40, pools[1].data_ptr(), 12)


@pytest.mark.slow
def test_transformers_says_what_our_engines_say(world: TinyWorld, steps: Steps) -> None:
    from graftline.bench.gpu_side_by_side import measure_side_by_side

    setting = Setting(world.plain.path, world.eagle, "cpu", "float32", num_pages=256, max_running=2, threads=1)
    measure_side_by_side(steps, "tiny", setting, batches=(1, 2), new_tokens=6, static_s=120, dynamic_s=120)
    for cache in ("static", "dynamic"):
        theirs = steps.found[f"tiny, transformers {cache}"]
        assert theirs["ending"] == "exit code 0"
        for batch in (1, 2):
            found = theirs["found"][f"transformers, {cache} cache, batch {batch}"]
            assert found["ids"] == steps.found["tiny, graftline plain"][f"batch {batch}"]["ids"]
            assert found["ids"] == steps.found["tiny, graftline S3 K1 V4"][f"batch {batch}"]["ids"]
