"""Time per output token of one stage and of two, plain and with EAGLE from a root or a real tree, by concurrency."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from graftline.bench.gpu_configs import Setting, shape_name
from graftline.bench.gpu_steps import Steps
from graftline.bench.gpu_workers import PairAnswer, StageUse, WorkerPair, worker_pair
from graftline.bench.multi_gpu_configs import decode_over, prefill_over
from graftline.bench.stats import median
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.split_measure import measured_split
from graftline.engine.tree_shape import TreeShape


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of every pair.

    Attributes:
        prompt_len: tokens of every prompt.
        output_tokens: of an answer at concurrency 1 and 2: what a first round's tree is worth is spread over them.
        steady_tokens: of an answer at higher concurrency, so that all requests decode together for a while.
        texts: prompts of text, for heads that draft nothing useful behind others; cut to `prompt_len`.
        prefix_cache: of the prefill.
    """

    prompt_len: int
    concurrencies: Sequence[int]
    output_tokens: int
    steady_tokens: int
    num_pages: int
    page_size: int = 16
    chunk_tokens: int = 1024
    threads: int = 4
    repeats: int = 3
    texts: Sequence[Sequence[int]] = ()
    prefix_cache: bool = False

    @classmethod
    def of_gpu(cls, prompt_len: int, texts: Sequence[Sequence[int]] = ()) -> "Load":
        """What a run of nine minutes has time for."""
        pages = 33 * (-(-(prompt_len + 320) // 16) + 1)
        return cls(prompt_len, (1, 2, 8, 32), 64, 256, pages, texts=texts)

    @classmethod
    def of_long_prompts(cls, prompt_len: int) -> "Load":
        """Prompts that take longer to compute than there is time for: the prefill keeps them after their first use."""
        pages = 33 * (-(-(prompt_len + 192) // 16) + 1)
        return cls(prompt_len, (32, 8, 1), 64, 128, pages, chunk_tokens=4096, repeats=2, prefix_cache=True)

    @classmethod
    def small(cls) -> "Load":
        """For trying the logic on a CPU."""
        return cls(24, (1, 4), 12, 16, 64, chunk_tokens=32, threads=1, repeats=1)

    def tokens_at(self, concurrency: int) -> int:
        """Output tokens of every answer."""
        return self.output_tokens if concurrency <= 2 else self.steady_tokens

    def prompts(self, concurrency: int, vocab: int) -> list[list[int]]:
        """As many prompts as there are requests at a time, all different, unless there are fewer texts."""
        if self.texts:
            return [list(self.texts[row % len(self.texts)])[: self.prompt_len] for row in range(concurrency)]
        limit = min(vocab - 2, 30000) - 2
        return [[(31 * row + 7 * index) % limit + 2 for index in range(self.prompt_len)] for row in range(concurrency)]


def measure_speculation(
    steps: Steps, name: str, model: Path, head: Path | None, devices: Sequence[str], load: Load, shape: TreeShape
) -> None:
    """Notes every pair of engines by concurrency and kind of start, then ratios and the stages' use."""
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
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for stages, tree in ((2, shape), (2, None), (1, None)):
        if tree is not None and head is None:
            continue
        where = f"{name}, {stages} stages {'plain' if tree is None else f'EAGLE {shape_name(tree)}'}"
        run = partial(_measure_pair, steps, where, setting, tree, devices[-stages:], load, found)
        steps.step(where, run, needs_s=15.0)
    steps.note(f"{name}, ratios", dict(_ratios(found, load.concurrencies)))


def _measure_pair(
    steps: Steps,
    where: str,
    setting: Setting,
    tree: TreeShape | None,
    devices: Sequence[str],
    load: Load,
    found: dict[tuple[str, int], dict[str, Any]],
) -> dict[str, Any]:
    """Starts engines of one kind, measures every concurrency, and tells how the layers were split."""
    decode = decode_over(setting, tree, devices)
    if len(devices) > 1:
        decode = decode_over(setting, tree, devices, measured_split(decode))
    # The prefill shares a GPU with a stage of two: the first one's, or the last one's, which has fewer layers, where it
    # keeps all prompts.
    beside = devices[-1] if load.prefix_cache and len(devices) > 1 else setting.device
    prefill = prefill_over(setting, tree, [beside], prefix_cache=load.prefix_cache)
    starts = {"plain": True} if tree is None else {"real tree": True, "root-only": False}
    with worker_pair(prefill, decode) as pair:
        for concurrency, (start, real_tree) in product(load.concurrencies, starts.items()):
            kind = f"{len(devices)} stages {start}"
            run = partial(_figures, pair, setting.model, load, concurrency, real_tree)
            figures = steps.step(f"{where}, {start}, concurrency {concurrency}", run, needs_s=3.0)
            if figures is not None:
                found[kind, concurrency] = figures
    return {"layers": decode.layer_split}


def _figures(pair: WorkerPair, model: Path, load: Load, concurrency: int, real_tree: bool) -> dict[str, Any]:
    prompts = load.prompts(concurrency, read_model_config(model).vocab_size)
    tokens = load.tokens_at(concurrency)
    pair.run(prompts, 4, real_tree=real_tree)
    answers: list[PairAnswer] = []
    uses: list[StageUse] = []
    steady: list[float] = []
    for _ in range(load.repeats if concurrency <= 2 else 1):
        with pair.watched(uses):
            run = pair.run(prompts, tokens, real_tree=real_tree)
        answers += run
        steady.append(steady_rate(run))
    rounds = sum(answer.speculation.rounds for answer in answers)
    accepted = sum(answer.speculation.accepted for answer in answers)
    return {
        "tpot_ms": 1e3 * median([answer.tpot_s for answer in answers]),
        "ttft_ms": 1e3 * median([answer.ttft_s for answer in answers]),
        "tokens_per_s": median(steady),
        "accept_length": (accepted + rounds) / rounds if rounds else None,
        "first_round_accepted": sum(answer.speculation.first_round_accepted for answer in answers) / len(answers),
        "stage_busy": [
            {"stage": use.stage, "busy": use.busy, "ms_a_step": 1e3 * use.busy_s / use.steps if use.steps else None}
            for use in uses[-2:]
        ],
    }


def steady_rate(answers: Sequence[PairAnswer]) -> float:
    """Tokens a second while all of the requests decode; over the whole run when they never do so together."""
    begin_s = max(answer.arrivals[0][0] for answer in answers)
    end_s = min(answer.arrivals[-1][0] for answer in answers)
    if end_s <= begin_s:
        begin_s = min(answer.arrivals[0][0] for answer in answers)
        end_s = max(answer.arrivals[-1][0] for answer in answers)
    counted = sum(count for answer in answers for second, count in answer.arrivals if begin_s < second <= end_s)
    return counted / (end_s - begin_s) if end_s > begin_s else 0.0


def _ratios(found: dict[tuple[str, int], dict[str, Any]], concurrencies: Sequence[int]) -> Iterator[tuple[str, float]]:
    """What the issue asks for, of the figures there are."""
    wanted = (
        ("real tree over plain, TPOT", "2 stages real tree", "2 stages plain", "tpot_ms"),
        ("real tree over root-only, TPOT", "2 stages real tree", "2 stages root-only", "tpot_ms"),
        ("2 stages over 1, tokens a second", "2 stages plain", "1 stages plain", "tokens_per_s"),
    )
    for concurrency, (name, above, below, figure) in product(concurrencies, wanted):
        ours, theirs = found.get((above, concurrency)), found.get((below, concurrency))
        if ours and theirs and theirs[figure]:
            yield f"concurrency {concurrency}: {name}", ours[figure] / theirs[figure]
