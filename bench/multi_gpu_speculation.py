"""Time per output token of one stage and several, plain and with EAGLE from a root or a real tree, by concurrency."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from graftline.bench.gpu_configs import Setting, shape_name
from graftline.bench.gpu_steps import Steps
from graftline.bench.gpu_workers import PairAnswer, WorkerPair, worker_pair
from graftline.bench.multi_gpu_configs import decode_over, prefill_over
from graftline.bench.multi_gpu_load import Ask, Load
from graftline.bench.stage_use import Sign, StageUse, stage_uses
from graftline.bench.stats import mean, median
from graftline.bench.steady_window import steady_windows, tokens_per_s, tpot_s
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.split_measure import measured_split
from graftline.engine.tree_shape import TreeShape

CHAIN = TreeShape(5, 1, 6)
"""Beside the usual tree where many requests make a verify of many nodes compute-bound."""
PAIRS = ("eagle2", "plain2", "plain1", "eagle1", "chain2")
"""Engines by what they draft and their stages, the most telling first."""
_PAIR = re.compile("(eagle|plain|chain)([1-9])")
_WARM_UP_TOKENS = 4


def stages_of(pair: str) -> int:
    """How many stages the decode of a pair such as "eagle2" has.

    Raises:
        ValueError: no such name.
    """
    if (found := _PAIR.fullmatch(pair)) is None:
        raise ValueError(f"no pair {pair!r}: eagle, plain or chain with a number of stages is wanted, such as eagle2")
    return int(found[2])


@dataclass(frozen=True, slots=True)
class Kind:
    """A pair of engines and how its requests start.

    Attributes:
        tree: None: plain.
        real_tree: first rounds verify the prefill's tree, not the root alone.
    """

    stages: int
    tree: TreeShape | None
    real_tree: bool = True

    @property
    def pair_name(self) -> str:
        """Of the engines."""
        return f"{self.stages} stages {'plain' if self.tree is None else f'EAGLE {shape_name(self.tree)}'}"

    @property
    def start_name(self) -> str:
        """Of the start; nothing for plain engines."""
        return "" if self.tree is None else ", real tree" if self.real_tree else ", root-only"


Figures = dict[str, Any]
Found = dict[tuple[Kind, Ask], Figures]


def measure_speculation(
    steps: Steps,
    name: str,
    model: Path,
    head: Path | None,
    devices: Sequence[str],
    load: Load,
    shape: TreeShape,
    pairs: Sequence[str] = PAIRS,
) -> None:
    """Notes pairs of engines in their order, by concurrency and kind of start, and ratios of those that there are.

    Args:
        devices: a decode takes the last ones, a prefill the first one, which is its own where there is one to spare.
        pairs: see `stages_of`.
    """
    is_cpu = devices[0] == "cpu"
    setting = Setting(
        model,
        head,
        devices[0],
        "float32" if is_cpu else "bfloat16",
        page_size=load.page_size,
        num_pages=load.num_pages,
        max_running=max(load.concurrencies),
        chunk_tokens=load.chunk_tokens,
        threads=load.threads,
    )
    found: Found = {}
    for kind, asks in (_kind_and_asks(pair, shape, load) for pair in pairs):
        if kind.tree is not None and head is None:
            continue
        where = f"{name}, {kind.pair_name}"
        run = partial(_measure_pair, steps, where, setting, kind, asks, devices, load, found)
        steps.step(where, run, needs_s=load.start_s)
        steps.note(f"{name}, ratios", dict(ratios(found, load, shape)))


def _kind_and_asks(pair: str, shape: TreeShape, load: Load) -> tuple[Kind, list[Ask]]:
    stages = stages_of(pair)
    rates = [load.steady(concurrency) for concurrency in load.concurrencies]
    if pair.startswith("chain"):
        return Kind(stages, CHAIN), [ask for ask in rates if ask.concurrency > 2]
    kind = Kind(stages, None if pair.startswith("plain") else shape)
    return kind, rates if stages == 1 else load.asks()


def _measure_pair(
    steps: Steps,
    where: str,
    setting: Setting,
    kind: Kind,
    asks: Sequence[Ask],
    devices: Sequence[str],
    load: Load,
    found: Found,
) -> Figures:
    """Starts engines of one kind, measures every concurrency, and tells how the layers were split."""
    own = devices[-kind.stages :]
    decode = decode_over(setting, kind.tree, own)
    if len(own) > 1:
        decode = decode_over(setting, kind.tree, own, measured_split(decode))
    # Without a device to spare the prefill shares one with a stage: the first one's, or the last one's, which has
    # fewer layers, where it keeps all prompts.
    is_shared = len(own) == len(devices)
    beside = devices[-1] if is_shared and load.keeps_prompts else devices[0]
    pages = load.prefill_pages or setting.num_pages
    prefill = prefill_over(replace(setting, num_pages=pages), kind.tree, [beside], prefix_cache=load.keeps_prompts)
    vocab = read_model_config(setting.model).vocab_size
    with worker_pair(prefill, decode) as pair:
        if load.keeps_prompts:
            pair.run(load.groups(load.short(1), vocab)[0], _WARM_UP_TOKENS)
        for ask in asks:
            for one in _starts(kind, ask):
                run = partial(_figures, pair, load.groups(ask, vocab), ask, one.real_tree)
                figures = steps.step(f"{where}{one.start_name}, {ask.name}", run, needs_s=load.needs_s(ask))
                if figures is not None:
                    found[one, ask] = figures
    return {"layers": decode.layer_split, "prefill": f"{beside}, {'a stage' if is_shared else 'nobody'} beside it"}


def _starts(kind: Kind, ask: Ask) -> list[Kind]:
    """What the first tree is worth shows in short answers, and is asked of two stages."""
    is_asked = kind.tree is not None and kind.stages > 1 and not ask.together
    return [kind, replace(kind, real_tree=False)] if is_asked else [kind]


def _figures(pair: WorkerPair, groups: Sequence[Sequence[Sequence[int]]], ask: Ask, real_tree: bool) -> Figures:
    pair.run(groups[0], _WARM_UP_TOKENS, real_tree=real_tree)
    runs: list[list[PairAnswer]] = []
    signs: list[Sign] = []
    with pair.decode.watched(signs):
        runs += [
            pair.run(group, ask.tokens, real_tree=real_tree, together=ask.together)
            for group in list(groups) * ask.repeats
        ]
    answers = list(chain.from_iterable(runs))
    windows = list(steady_windows(runs))
    uses = stage_uses(signs, [(window.begin_s, window.end_s) for window in windows])
    each = [answer.decode_tpot_s if ask.together else answer.tpot_s for answer in answers]
    rounds = sum(answer.speculation.rounds for answer in answers)
    accepted = sum(answer.speculation.accepted for answer in answers)
    return {
        "answers": len(answers),
        "tpot_ms": 1e3 * median(each),
        "mean_tpot_ms": 1e3 * mean(each),
        "ttft_ms": 1e3 * median([answer.ttft_s for answer in answers]),
        "accept_length": (accepted + rounds) / rounds if rounds else None,
        "first_round_accepted": sum(answer.speculation.first_round_accepted for answer in answers) / len(answers),
        "window": {
            "seconds": sum(window.seconds for window in windows),
            "tokens": sum(window.tokens for window in windows),
            "runs": f"{len(windows)} of {len(runs)}",
        },
        "tokens_per_s": tokens_per_s(windows),
        "window_tpot_ms": _ms(tpot_s(windows)),
        "stage_busy": [_stage_figures(use) for use in uses],
    }


def _stage_figures(use: StageUse) -> Figures:
    return {
        "stage": use.stage,
        "busy": use.busy,
        "ms_a_step": _ms(use.s_a_step),
        "steps": use.steps,
        "seconds": use.seconds,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def ratios(found: Mapping[tuple[Kind, Ask], Figures], load: Load, shape: TreeShape) -> Iterator[tuple[str, float]]:
    """What the issue asks for, of the figures there are."""
    one_real, one_plain = Kind(1, shape), Kind(1, None)
    drafts = f"EAGLE {shape_name(CHAIN)}"
    compared: list[tuple[str, Kind, Kind, Callable[[int], Ask], str]] = []
    for stages in sorted({kind.stages for kind, _ in found}):
        real, plain, chained = Kind(stages, shape), Kind(stages, None), Kind(stages, CHAIN)
        root_only = Kind(stages, shape, real_tree=False)
        of = "" if stages == 2 else f"{stages} stages: "
        compared += [
            (f"{of}real tree over plain, TPOT of answers", real, plain, load.steady, "tpot_ms"),
            (f"{of}real tree over plain, TPOT in the window", real, plain, load.steady, "window_tpot_ms"),
            (f"{of}real tree over root-only, mean TPOT of answers", real, root_only, load.short, "mean_tpot_ms"),
            (f"{of}real tree over root-only, median TPOT of answers", real, root_only, load.short, "tpot_ms"),
            (f"{of}{drafts} over plain, TPOT of answers", chained, plain, load.steady, "tpot_ms"),
            (f"{of}{drafts} over plain, TPOT in the window", chained, plain, load.steady, "window_tpot_ms"),
            (
                f"{of}{drafts} over {shape_name(shape)}, TPOT in the window",
                chained,
                real,
                load.steady,
                "window_tpot_ms",
            ),
        ]
        if stages > 1:
            over = f"{stages} stages over 1"
            compared += [
                (f"{over}, plain, tokens a second", plain, one_plain, load.steady, "tokens_per_s"),
                (f"{over}, real tree, tokens a second", real, one_real, load.steady, "tokens_per_s"),
                (f"{over} plain, {drafts}, tokens a second", chained, one_plain, load.steady, "tokens_per_s"),
            ]
    for concurrency in load.concurrencies:
        for name, above, below, ask_of, figure in compared:
            ask = ask_of(concurrency)
            ours, theirs = (found.get((kind, ask), {}).get(figure) for kind in (above, below))
            if ours and theirs:
                yield f"{ask.name}: {name}", ours / theirs
