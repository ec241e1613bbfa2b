"""What a round costs by the shape of its tree: growth, verify, all of it; and what that means in tokens a second.

On a GPU growth and verify are timed as CUDA graphs of their own, the whole round as it is served. On a CPU
(`python -m graftline.bench.gpu_drafter --device cpu --out FILE`) they are timed as the planned path runs them.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graftline.bench.gpu_configs import TREES, Setting, shape_name
from graftline.bench.gpu_rates import as_graph, timed_s
from graftline.bench.gpu_stage import StageAlone
from graftline.bench.gpu_steps import Steps
from graftline.engine.config import EngineConfig
from graftline.engine.draft_layer import DraftLayer, TargetHead
from graftline.engine.drafter import Drafter, GrowthRoot
from graftline.engine.kv_pool import KvPool
from graftline.engine.memory_plan import DTYPES, draft_geometry, draft_scratch_pages, target_geometry
from graftline.engine.model_fetch import draft_head_path, resolve_model
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.load import load_model
from graftline.engine.models.target_model import TargetModel
from graftline.engine.tree_shape import TreeShape
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.tree_batch import TreeBatch

ACCEPT_LENGTHS: Mapping[str, float] = {
    "S3 K1 V4": 2.94,
    "S5 K1 V6": 3.67,
    "S4 K2 V8": 3.72,
    "S5 K4 V16": 4.38,
}
"""Of the default model's head, greedy, from its card (all of the same answers); S6 K8 V32 was not measured there."""

_CONTEXT = 512
_ROUNDS = 30


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of one request's round.

    Attributes:
        growth_s: from the drafter's last output to a tree.
        verify_s: the target's layers and head over the tree's nodes.
        round_s: everything: compaction, verify, walk, extend, growth, results on the host.
        plain_s: a round of one node without drafter.
        accept_length: tokens a round from the head's card, None where it has none.
    """

    growth_s: float
    verify_s: float
    round_s: float
    plain_s: float
    accept_length: float | None

    def figures(self) -> dict[str, Any]:
        """With the tokens a second that follow."""
        found: dict[str, Any] = {
            "growth_ms": 1e3 * self.growth_s,
            "verify_ms": 1e3 * self.verify_s,
            "round_ms": 1e3 * self.round_s,
            "plain_round_ms": 1e3 * self.plain_s,
            "accept_length": self.accept_length,
        }
        if self.accept_length is not None:
            found["tokens/s"] = self.accept_length / self.round_s
            found["over plain"] = self.accept_length * self.plain_s / self.round_s
        return found


def measure_drafter(
    steps: Steps,
    setting: Setting,
    shapes: Sequence[TreeShape] = TREES,
    *,
    context: int = _CONTEXT,
    rounds: int = _ROUNDS,
    accept_lengths: Mapping[str, float] = ACCEPT_LENGTHS,
) -> None:
    """Notes every shape by its name."""
    assert setting.head is not None, "a drafter needs a head"
    is_cuda = torch.device(setting.device).type == "cuda"
    most = max(context + (2 * rounds + 8) * (shape.depth + 1) + 2 * shape.nodes for shape in shapes)
    setting = replace(setting, num_pages=-(-most // setting.page_size) + 1, max_running=1)

    def whole_round(tree: TreeShape | None) -> float:
        stage = StageAlone(setting.decode(tree, device_rounds=is_cuda))
        stage.open(1, context, most - context)
        stage.rounds(4)
        return stage.rounds(rounds).wall_s

    plain_s = steps.step("plain", lambda: whole_round(None))
    if plain_s is None:
        return
    for shape in shapes:
        steps.step(
            shape_name(shape),
            lambda shape=shape: DraftCost(  # type: ignore[misc]
                *growth_and_verify_s(setting.decode(shape), context, rounds),
                whole_round(shape),
                plain_s,
                accept_lengths.get(shape_name(shape)),
            ).figures(),
        )


def with_measured_lengths(found: Mapping[str, Any], by_temperature: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens a second of every shape that was timed, with accept lengths measured in the same run.

    Args:
        found: what `measure_drafter` noted.
        by_temperature: what `draft-head eval --json` writes; the first table counts, its mean over kinds.
    """
    kinds = by_temperature[0]["kinds"].values()
    speeds: dict[str, Any] = {
        "prompts": sorted(by_temperature[0]["kinds"]),
        "temperature": by_temperature[0]["temperature"],
    }
    for shape in TREES:
        name = shape_name(shape)
        label = f"S{shape.depth}" if shape.branching == 1 else name
        timed = found.get(name)
        if not timed or "round_ms" not in timed or any(label not in kind["accept_length"] for kind in kinds):
            continue
        length = sum(kind["accept_length"][label] for kind in kinds) / len(kinds)
        over_plain = length * timed["plain_round_ms"] / timed["round_ms"]
        speeds[name] = {"accept_length": length, "tokens/s": 1e3 * length / timed["round_ms"], "over plain": over_plain}
    return speeds


def growth_and_verify_s(config: EngineConfig, context: int, rounds: int) -> tuple[float, float]:
    """Seconds of a growth and of a verify for one request with `context` committed tokens."""
    device, dtype = torch.device(config.devices[0]), DTYPES[config.dtype]
    checkpoint = open_checkpoint(Path(config.model))
    model = load_model(checkpoint, range(checkpoint.config.num_layers), dtype, device)
    pool = KvPool(
        target_geometry(config, checkpoint.config, 0),
        config.num_pages,
        layers=range(checkpoint.config.num_layers),
        device=device,
    )
    pool.data.normal_()
    with torch.inference_mode():
        grow = _growth(config, model, context)
        verify = _verify(config, model, pool, context)
        return timed_s(device, as_graph(device, grow), rounds), timed_s(device, as_graph(device, verify), rounds)


def _growth(config: EngineConfig, model: TargetModel, context: int) -> Callable[[], object]:
    device, dtype = model.device, DTYPES[config.dtype]
    assert config.draft_head is not None
    shared = TargetHead(
        embed=model.embed,
        head_rows=model.head_rows,
        logits=model.logits,
        num_layers=model.config.num_layers,
        context_length=model.config.context_length,
        embedding=model.embedding,
        head=model.head,
    )
    storage = torch.int8 if device.type == "cpu" and dtype == torch.bfloat16 else dtype
    layer = DraftLayer(Path(config.draft_head), shared, dtype, device, storage)
    pool = KvPool(
        draft_geometry(config, layer.config),
        config.num_pages,
        layers=(0,),
        scratch_pages=draft_scratch_pages(config),
        device=device,
    )
    pool.data.normal_()
    drafter = Drafter(layer, pool, config.grown_tree)
    activations = torch.float32 if device.type == "cpu" else dtype
    output = torch.randn(1, layer.config.hidden_size, device=device).to(activations)
    pages = list(range(-(-context // config.page_size) + 1))
    if device.type != "cuda":
        root = GrowthRoot(1, context, pages)
        return lambda: drafter.grow(output, [root])
    rounds = drafter.for_rounds
    bonus = torch.ones(1, dtype=torch.int64, device=device)
    start = torch.tensor([context], dtype=torch.int32, device=device)
    table = torch.tensor([pages], dtype=torch.int32, device=device)
    return lambda: rounds.growth.grow(output, bonus, start, table)


def _verify(config: EngineConfig, model: TargetModel, pool: KvPool, context: int) -> Callable[[], Tensor]:
    """Layers and head over V nodes, as a chain: what a verify computes does not depend on the parents."""
    device, nodes = model.device, config.tree.nodes
    tokens = torch.ones(nodes, dtype=torch.int64, device=device)
    pages = list(range(-(-(context + nodes) // config.page_size)))
    batch: Any
    if device.type != "cuda":
        batch = build_attention_batch([SegmentRows(context, nodes, pages)], config.page_size, device)
    else:
        local = torch.arange(nodes, device=device)
        batch = TreeBatch(
            positions=(context + local).int(),
            row_slots=context + local,  # the pages are in order
            visible=(torch.ones_like(local) << (local + 1)) - 1,
            starts=torch.tensor([context], dtype=torch.int32, device=device),
            page_tables=torch.tensor([pages], dtype=torch.int32, device=device),
            rows_each=nodes,
            num_tail=nodes,
            page_size=config.page_size,
        )

    def run() -> Tensor:
        hidden, _ = model.run_layers(model.embed(tokens), batch, pool)
        return model.logits(model.final_norm(hidden))

    return run


def main() -> None:
    """Measures the default model's head, or another one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    head = arguments.head or draft_head_path(model)
    setting = Setting(model, head, arguments.device, arguments.dtype, threads=torch.get_num_threads())
    measure_drafter(Steps(arguments.out, arguments.seconds), setting, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
