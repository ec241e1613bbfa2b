"""Contract 8: the plan of a hybrid model is the closed formula of docs/memory.md, and what a prefill skips is room."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from graftline.engine.config import MTP_HEAD, EngineConfig, Role
from graftline.engine.draft_choice import carries_mtp, chosen_head, mtp_config
from graftline.engine.memory_plan import MemoryPlan, pages_within, plan_memory
from graftline.engine.models.config import ModelConfig, config_from_dict, read_config
from graftline.engine.models.hybrid_figures import active_layer_weights, hybrid_layer_bytes, mtp_bytes
from graftline.engine.models.qwen3_next_random import write_tiny_qwen3_next
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape
from graftline.engine.verify_mode import VerifyMode
from graftline.errors import InvalidRequestError, OutOfCapacityError

MIB = 1 << 20
# Qwen3-Next-80B-A3B; what transformers takes when a value is absent is what was published.
PUBLISHED = {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rope_theta": 10000000,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}


@pytest.fixture(scope="module")
def published() -> ModelConfig:
    return config_from_dict(PUBLISHED, {})


def test_graphs_and_rings_are_told_once_they_are_there(published: ModelConfig) -> None:
    """No plan knows what capturing takes, nor how stages will be joined: it is added when they have started."""
    config = EngineConfig(model="none", role=Role.DECODE, layer_split=(24, 24), tree=NO_SPECULATION)
    planned = plan_memory(config, published, None)
    assert [(stage.graph_bytes, stage.ring_bytes) for stage in planned.stages] == [(0, 0), (0, 0)]
    started = planned.started([5 * MIB, 7 * MIB], [0, 32 * MIB])
    assert [(stage.graph_bytes, stage.ring_bytes) for stage in started.stages] == [(5 * MIB, 0), (7 * MIB, 32 * MIB)]
    assert started.pool_bytes == planned.pool_bytes, "neither is a pool"


def config(role: Role, split: tuple[int, ...] = (48,), **others: Any) -> EngineConfig:
    fields = {"num_pages": 1000, "max_running": 256, "draft_head": MTP_HEAD, "devices": ("cuda",), **others}
    return EngineConfig(model="published", role=role, layer_split=split, **fields)


def planned(model: ModelConfig, settings: EngineConfig) -> MemoryPlan:
    return plan_memory(settings, model, chosen_head(settings, model))


@pytest.mark.parametrize("split", [(48,), (24, 24), (1, 46, 1)], ids=str)
def test_state_and_verify_state_are_the_closed_formula(published: ModelConfig, split: tuple[int, ...]) -> None:
    """docs/memory.md: slots, layers and nodes times what a layer keeps."""
    layer = 3 * 8192 * 2 + 32 * 128 * 128 * 4
    inputs = 8192 * 2 + (16 * 128 + 32 * 128 + 2 * 32) * 4
    for mode, node in ((VerifyMode.SNAPSHOT, layer), (VerifyMode.REPLAY, inputs)):
        memory = planned(published, config(Role.DECODE, split, verify_state=mode))
        for stage in memory.stages:
            linear = sum((index + 1) % 4 != 0 for index in stage.layers)
            assert stage.state_bytes == 257 * linear * layer
            assert stage.verify_state_bytes == 257 * 3 * linear * node
            assert stage.target_kv_bytes == 1000 * 16 * (len(stage.layers) - linear) * 2 * 2 * 256 * 2


def test_a_prefill_takes_no_verify_state_and_uses_the_room(published: ModelConfig) -> None:
    """CASES S40. What it skips is what a decode takes; budgets are solved by the same plan."""
    prefill, decode = (planned(published, config(role, (24, 24))) for role in (Role.PREFILL, Role.DECODE))
    assert [stage.verify_state_bytes for stage in prefill.stages] == [0, 0]
    assert prefill.skipped_stage_bytes == tuple(stage.verify_state_bytes for stage in decode.stages)
    assert prefill.skips_verify
    assert not decode.skips_verify
    assert decode.skipped_bytes == 0
    assert prefill.pool_bytes + prefill.skipped_bytes == decode.pool_bytes
    assert [stage.state_bytes for stage in prefill.stages] == [stage.state_bytes for stage in decode.stages]
    assert prefill.stages[1].draft_kv_bytes == decode.stages[1].draft_kv_bytes > 0
    assert prefill.stages[1].draft_weight_bytes > 0
    head, budget = mtp_config(published), 100_000 * MIB
    for role, more in ((Role.PREFILL, True), (Role.DECODE, False)):
        settings = config(role, verify_state=VerifyMode.SNAPSHOT)
        pages = pages_within(settings, published, head, budget)
        fitting, beyond = (
            planned(published, msgspec.structs.replace(settings, num_pages=count)).pool_bytes
            for count in (pages, pages + 1)
        )
        assert fitting <= budget < beyond
        assert (pages > 150_000) is more


def test_scratch_is_that_of_the_trees_a_role_grows(published: ModelConfig) -> None:
    """A prefill's trees may be deeper: more rows past the committed ones, of which a decode has no use."""
    plain, deeper = TreeShape(5, 4, 16), TreeShape(5, 4, 16, initial_depth=9)
    for role, grows in ((Role.PREFILL, True), (Role.DECODE, False)):
        usual, deep = (planned(published, config(role, tree=tree)).stages[-1] for tree in (plain, deeper))
        assert usual.draft_scratch_bytes > 0
        assert (deep.draft_scratch_bytes > usual.draft_scratch_bytes) is grows
        assert replace(deep, draft_scratch_bytes=usual.draft_scratch_bytes) == usual


def test_a_stage_without_attention_has_no_pages(published: ModelConfig) -> None:
    memory = planned(published, config(Role.PREFILL, (3, 45)))
    assert memory.stages[0].target_kv_bytes == 0
    assert memory.stages[0].state_bytes > 0
    with pytest.raises(OutOfCapacityError):
        pages_within(config(Role.PREFILL, (3, 45)), published, None, memory.stages[0].state_bytes - 1)


def test_without_speculation_nothing_is_kept_of_nodes(published: ModelConfig) -> None:
    memory = planned(published, config(Role.DECODE, tree=TreeShape(1, 1, 1), draft_head=None))
    assert memory.stages[0].verify_state_bytes == 0
    assert memory.stages[0].draft_weight_bytes == 0


def test_weights_are_counted_as_the_files_hold_them(tmp_path: Path) -> None:
    path = write_tiny_qwen3_next(tmp_path, conv_width=3, experts=5, expert_size=24)
    tensors, model = load_file(path / "model.safetensors"), read_config(path)

    def stored(prefix: str) -> int:
        return sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(prefix))

    for layer in range(4):
        wanted = stored(f"model.layers.{layer}.")
        assert hybrid_layer_bytes(model, layer, torch.float32, torch.float32) == wanted
    assert mtp_bytes(model, torch.float32, torch.float32) == stored("mtp.")
    whole = planned(
        model, EngineConfig(model=str(path), role=Role.DECODE, layer_split=(4,), dtype="float32", draft_head=MTP_HEAD)
    )
    assert whole.stages[0].weight_bytes == stored("model.") + stored("lm_head.")
    assert active_layer_weights(model) * 4 < stored("model.layers."), "experts that a token does not pass"


def test_who_has_an_mtp_module(published: ModelConfig, tmp_path: Path) -> None:
    assert carries_mtp(write_tiny_qwen3_next(tmp_path / "with"))
    without = write_tiny_qwen3_next(tmp_path / "without", mtp=False)
    assert not carries_mtp(without)
    (without / "model.safetensors").unlink()
    assert carries_mtp(without), "a bare config"
    with pytest.raises(InvalidRequestError, match="MTP"):
        mtp_config(replace(published, hybrid=None))
