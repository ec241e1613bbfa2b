"""Engine configuration and tree shapes."""

from typing import Any

import msgspec
import pytest

from graftline.engine.config import EngineConfig, Role, StageMode
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape
from graftline.errors import InvalidRequestError


def config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"model": "m", "role": Role.DECODE, "draft_head": "h", "layer_split": (1, 3)}
    return EngineConfig(**(fields | changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("num_pages", -1),
        ("max_running", 0),
        ("max_queued", 0),
        ("chunk_tokens", 0),
        ("threads", 0),
        ("dtype", "float16"),
        ("layer_split", ()),
        ("layer_split", (2, 0, 2)),
        ("draft_head", None),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        config(**{field: value})
    assert refusal.value.field == field


def test_stages_get_contiguous_layers() -> None:
    built = config(layer_split=(2, 1, 4))
    assert built.num_stages == 3
    assert [list(built.stage_layers(stage)) for stage in range(3)] == [[0, 1], [2], [3, 4, 5, 6]]


def test_a_stage_process_reads_the_very_same_configuration() -> None:
    built = config(tree=TreeShape(4, 2, 8), stage_mode=StageMode.THREADS, prefix_cache=False, heartbeat_s=0.25)
    assert EngineConfig.from_json(built.to_json()) == built
    with pytest.raises(msgspec.ValidationError, match="page_size"):
        EngineConfig.from_json(built.to_json().replace('"page_size":16', '"page_size":"x"'))


@pytest.mark.parametrize(
    ("depth", "branching", "nodes", "field"),
    [
        (0, 1, 2, "draft_depth"),
        (65, 1, 4, "draft_depth"),
        (3, 0, 4, "draft_branching"),
        (3, 65, 4, "draft_branching"),
        (3, 1, 0, "draft_nodes"),
        (3, 1, 65, "draft_nodes"),
        (3, 1, 5, "draft_nodes"),
        (1, 4, 6, "draft_nodes"),
        (2, 2, 8, "draft_nodes"),
    ],
)
def test_shapes_that_cannot_grow_are_refused(depth: int, branching: int, nodes: int, field: str) -> None:
    """CASES S33: works, or is refused at start."""
    with pytest.raises(InvalidRequestError) as refusal:
        TreeShape(depth, branching, nodes)
    assert refusal.value.field == field


@pytest.mark.parametrize(("nodes", "initial_depth"), [(7, 0), (7, -1), (7, 65), (8, 2)])
def test_initial_depths_that_cannot_grow_are_refused(nodes: int, initial_depth: int) -> None:
    with pytest.raises(InvalidRequestError, match=str(nodes if initial_depth == 2 else initial_depth)) as refusal:
        TreeShape(4, 2, nodes, initial_depth)
    assert refusal.value.field == "initial_tree_depth"


@pytest.mark.parametrize(
    ("shape", "path_len", "longest"),
    [
        (TreeShape(1, 1, 1), 1, 1),
        (TreeShape(3, 1, 4), 4, 4),
        (TreeShape(5, 4, 16, 7), 6, 8),
        (TreeShape(5, 4, 16, 2), 6, 6),
        (TreeShape(5, 4, 4, 9), 4, 4),
    ],
)
def test_a_path_is_as_long_as_the_deepest_tree(shape: TreeShape, path_len: int, longest: int) -> None:
    """An initial tree counts too, and no path has more nodes than its tree."""
    assert (shape.path_len, shape.longest_path_len) == (path_len, longest)


def test_each_role_grows_trees_of_its_own_depth() -> None:
    shape = TreeShape(5, 4, 16, 7)
    assert config(role=Role.PREFILL, tree=shape).grown_tree == TreeShape(7, 4, 16)
    assert config(role=Role.DECODE, tree=shape).grown_tree is shape
    assert EngineConfig.from_json(config(tree=shape).to_json()).tree == shape


@pytest.mark.parametrize(
    ("shape", "candidates", "scratch_rows"),
    [
        (TreeShape(1, 1, 2), 1, 0),
        (TreeShape(3, 1, 4), 3, 2),
        (TreeShape(1, 5, 6), 5, 0),
        (TreeShape(4, 2, 15), 14, 6),
        (TreeShape(64, 1, 64), 64, 63),
    ],
)
def test_what_growth_considers_and_writes(shape: TreeShape, candidates: int, scratch_rows: int) -> None:
    assert shape.speculates
    assert (shape.max_candidates, shape.scratch_rows) == (candidates, scratch_rows)


def test_one_node_is_no_speculation() -> None:
    assert not NO_SPECULATION.speculates
    assert NO_SPECULATION.scratch_rows == 0
    assert config(draft_head=None, tree=NO_SPECULATION).draft_head is None
