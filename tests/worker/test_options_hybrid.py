"""Options of models with recurrent state, and the plan that is printed of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graftline.cli_worker import app
from graftline.engine.config import MTP_HEAD, Role
from graftline.engine.models.qwen3_next_random import write_tiny_qwen3_next
from graftline.engine.tree_shape import NO_SPECULATION
from graftline.engine.verify_mode import VerifyMode
from graftline.worker.options import EngineOptions, resolve_engine_config, to_arguments


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_next(tmp_path_factory.mktemp("hybrid"))


def test_the_models_own_module_drafts_and_no_prefix_is_cached(path: Path) -> None:
    options = EngineOptions(model=str(path), dtype="float32", stages=2, verify_state=VerifyMode.SNAPSHOT)
    config = resolve_engine_config(options, Role.DECODE)
    assert (config.draft_head, config.prefix_cache, config.verify_state) == (MTP_HEAD, False, VerifyMode.SNAPSHOT)
    assert sum(config.layer_split) == 4
    assert resolve_engine_config(replace(options, draft_head=MTP_HEAD), Role.PREFILL).draft_head == MTP_HEAD
    assert resolve_engine_config(replace(options, draft_head="none"), Role.DECODE).tree == NO_SPECULATION
    assert to_arguments(options)[-2:] == ["--verify-state", "snapshot"]


def test_a_prefill_gets_more_pages_from_the_same_memory(path: Path) -> None:
    options = EngineOptions(
        model=str(path), dtype="float32", memory_mib=1, max_running=16, verify_state=VerifyMode.SNAPSHOT
    )
    prefill, decode = (resolve_engine_config(options, role).num_pages for role in Role)
    assert prefill > 1.2 * decode


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_the_plan_is_printed(path: Path, role: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--model", str(path), "--role", role, "--stages", "2"])
    assert result.exit_code == 0, result.output
    assert ("never verifies" in result.output) is (role != "decode")
    assert result.output.count("tokens of KV fit") == (2 if role == "both" else 1)
    assert "verify state" in result.output
