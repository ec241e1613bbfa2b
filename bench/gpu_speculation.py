"""Time per output token by pipeline, draft tree and overlap, and how much of the host's time overlap hides."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from graftline.bench.gpu_configs import Setting, shape_name, usual_tree
from graftline.bench.gpu_pair import EnginePair, TimedAnswer, engine_pair
from graftline.bench.gpu_stage import StageAlone
from graftline.bench.gpu_steps import Steps
from graftline.bench.stats import median
from graftline.engine.tree_shape import TreeShape

OUTPUT_TOKENS = 64
_REPEATS = 3
_DEVICE_ROUNDS = 60


def measure_speculation(
    steps: Steps,
    name: str,
    setting: Setting,
    prompts: Sequence[Sequence[int]],
    *,
    tree: TreeShape | None = None,
    stages: Sequence[int] = (1, 2),
    batch: int = 1,
    output_tokens: int = OUTPUT_TOKENS,
) -> None:
    """Notes {stages} x {plain, root-only start, real tree} x {overlap on, off} under `name`, then what they say.

    Args:
        tree: the device's usual one when None.
        prompts: run in groups of `batch`, each group `_REPEATS` times after one to warm up.
    """
    found: dict[tuple[int, str, bool], dict[str, Any]] = {}
    tree = tree or usual_tree(setting.device)
    for count in stages:
        for shape in (None, tree):
            for overlap in (True, False):
                step = f"{name}, {count} stages, {shape_name(shape)}, overlap {'on' if overlap else 'off'}"
                kinds = steps.step(
                    step,
                    lambda count=count, shape=shape, overlap=overlap: _kinds(  # type: ignore[misc]
                        setting, shape, count, overlap, prompts, batch, output_tokens
                    ),
                    needs_s=5.0,
                )
                for kind, figures in (kinds or {}).items():
                    found[count, kind, overlap] = figures
    steps.step(f"{name}, ratios", lambda: _ratios(found))
    steps.step(f"{name}, host time", lambda: _host_time(setting, tree, found, prompts, batch))


def _kinds(
    setting: Setting,
    tree: TreeShape | None,
    stages: int,
    overlap: bool,
    prompts: Sequence[Sequence[int]],
    batch: int,
    output_tokens: int,
) -> dict[str, Any]:
    starts = {"plain": True} if tree is None else {"real tree": True, "root-only": False}
    with _pair(setting, tree, stages, overlap) as pair:
        return {
            kind: _tpot(pair, prompts, batch, output_tokens, real_tree=real_tree) for kind, real_tree in starts.items()
        }


@contextmanager
def _pair(setting: Setting, tree: TreeShape | None, stages: int, overlap: bool) -> Iterator[EnginePair]:
    with engine_pair(setting.prefill(tree), setting.decode(tree, stages, overlap=overlap)) as pair:
        yield pair


def _tpot(
    pair: EnginePair, prompts: Sequence[Sequence[int]], batch: int, output_tokens: int, *, real_tree: bool
) -> dict[str, Any]:
    groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
    pair.run(groups[0], output_tokens, real_tree=real_tree)
    answers: list[TimedAnswer] = []
    for _ in range(_REPEATS):
        for group in groups:
            answers += pair.run(group, output_tokens, real_tree=real_tree)
    rounds = sum(answer.speculation.rounds for answer in answers)
    accepted = sum(answer.speculation.accepted for answer in answers)
    steady = [answer for answer in answers if len(answer.arrivals) > 2]
    steady_s = sum(answer.arrivals[-1][0] - answer.arrivals[1][0] for answer in steady)
    first = sum(answer.speculation.first_round_accepted for answer in answers)
    return {
        "tpot_ms": 1e3 * median([answer.tpot_s for answer in answers]),
        "ttft_ms": 1e3 * median([answer.ttft_s for answer in answers]),
        "first_gap_ms": 1e3 * median([answer.arrivals[1][0] - answer.arrivals[0][0] for answer in answers]),
        "round_ms": 1e3 * steady_s / max(1, sum(len(answer.arrivals) - 2 for answer in steady)),
        "accept_length": (accepted + rounds) / rounds if rounds else None,
        "first_round_accepted": first / len(answers),
        "answers": len(answers),
    }


def _ratios(found: dict[tuple[int, str, bool], dict[str, Any]]) -> dict[str, Any]:
    """What the issue asks for, of the figures there are."""
    ratios = {}
    for stages, overlap in sorted({(stages, overlap) for stages, _, overlap in found}):
        kinds = {kind: found.get((stages, kind, overlap)) for kind in ("plain", "root-only", "real tree")}
        plain, root_only, real = kinds.values()
        where = f"{stages} stages, overlap {'on' if overlap else 'off'}"
        if plain and real:
            ratios[f"{where}: real tree over plain"] = real["tpot_ms"] / plain["tpot_ms"]
        if root_only and real:
            ratios[f"{where}: real tree over root-only"] = real["tpot_ms"] / root_only["tpot_ms"]
    return ratios


def _host_time(
    setting: Setting,
    tree: TreeShape,
    found: dict[tuple[int, str, bool], dict[str, Any]],
    prompts: Sequence[Sequence[int]],
    batch: int,
) -> dict[str, Any]:
    """Of one stage: a round's time without overlap minus the device's own is the host's; with overlap, what is left.

    Rounds behind the first one count: what lies before that is the handoff's time.
    """
    shares: dict[str, Any] = {}
    for kind, shape in (("plain", None), ("real tree", tree)):
        with_overlap, without = found.get((1, kind, True)), found.get((1, kind, False))
        if with_overlap is None or without is None:
            continue
        device_ms = 1e3 * _device_round_s(setting, shape, len(prompts[0]), batch)
        host_ms, shown_ms = without["round_ms"] - device_ms, with_overlap["round_ms"] - device_ms
        shares[kind] = {
            "device_ms": device_ms,
            "host_ms": host_ms,
            "shown_with_overlap_ms": shown_ms,
            "hidden": 1 - shown_ms / host_ms if host_ms > 0 else None,
        }
    return shares


def _device_round_s(setting: Setting, tree: TreeShape | None, context: int, batch: int) -> float:
    depth = 1 if tree is None else tree.depth + 1
    room = (_DEVICE_ROUNDS + 8) * depth + 128
    pages = batch * (-(-(context + room) // setting.page_size) + 1)
    stage = StageAlone(replace(setting, num_pages=max(pages, setting.num_pages)).decode(tree))
    stage.open(batch, context, room)
    stage.rounds(4)
    return stage.rounds(_DEVICE_ROUNDS).wall_s
