"""Our engines and transformers' `generate` in the same run: the same model, prompts, precision and batch sizes."""

import sys
from collections.abc import Sequence
from typing import Any

from graftline.bench.gpu_configs import Setting, shape_name, usual_tree
from graftline.bench.gpu_pair import TimedAnswer, engine_pair
from graftline.bench.gpu_steps import Steps, run_bounded
from graftline.bench.gpu_transformers import NEW_TOKENS, PROMPT_TOKENS, equal_prompts
from graftline.bench.stats import median
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.tree_shape import TreeShape

_MODULE = "graftline.bench.gpu_transformers"


def measure_side_by_side(
    steps: Steps,
    name: str,
    setting: Setting,
    *,
    batches: Sequence[int] = (1, 16, 4),
    new_tokens: int = NEW_TOKENS,
    static_s: float = 150.0,
    dynamic_s: float = 40.0,
) -> None:
    """Notes both under `name`; transformers' static cache first, which may take most of its time to compile."""
    prompts = equal_prompts(open_checkpoint(setting.model), max(batches))
    shapes: list[TreeShape | None] = [None] if setting.head is None else [None, usual_tree(setting.device)]
    for tree in shapes:
        steps.step(
            f"{name}, graftline {shape_name(tree)}",
            lambda tree=tree: _ours(setting, tree, prompts, batches, new_tokens),  # type: ignore[misc]
        )
    for cache, seconds in (("static", static_s), ("dynamic", dynamic_s)):
        steps.step(
            f"{name}, transformers {cache}",
            lambda cache=cache, seconds=seconds: _theirs(steps, setting, cache, batches, new_tokens, seconds),  # type: ignore[misc]
            needs_s=15.0,
        )


def _ours(
    setting: Setting, tree: TreeShape | None, prompts: Sequence[Sequence[int]], batches: Sequence[int], new_tokens: int
) -> dict[str, Any]:
    pages = -(-(PROMPT_TOKENS + new_tokens + 128) // setting.page_size) * max(batches)
    sizes = {"num_pages": max(pages, setting.num_pages), "max_running": max(batches)}
    found: dict[str, Any] = {}
    prefill, decode = setting.prefill(tree, **sizes), setting.decode(tree, **sizes)
    with engine_pair(prefill, decode) as pair:
        for batch in batches:
            group = prompts[:batch]
            pair.run(group, new_tokens)
            runs = [pair.run(group, new_tokens) for _ in range(2)]
            found[f"batch {batch}"] = min((_figures(answers) for answers in runs), key=lambda run: run["seconds"])
    return found


def _figures(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    begun, ended = min(answer.submitted_s for answer in answers), max(answer.arrivals[-1][0] for answer in answers)
    rounds = sum(answer.speculation.rounds for answer in answers)
    return {
        "batch": len(answers),
        "seconds": ended - begun,
        "tokens/s": sum(len(answer.ids) for answer in answers) / (ended - begun),
        "ttft_s": median([answer.ttft_s for answer in answers]),
        "tpot_s": median([answer.tpot_s for answer in answers]),
        "accept_length": 1 + sum(answer.speculation.accepted for answer in answers) / rounds if rounds else None,
        "ids": answers[0].ids,
    }


def _theirs(
    steps: Steps, setting: Setting, cache: str, batches: Sequence[int], new_tokens: int, seconds: float
) -> dict[str, Any]:
    """What a process of transformers has found when it ended or was killed."""
    seconds = min(seconds, steps.left_s)
    part = steps.part(f"transformers-{cache}")
    command = [sys.executable, "-m", _MODULE, "--out", str(part), "--model", str(setting.model), "--cache", cache]
    command += ["--device", setting.device, "--dtype", setting.dtype, "--seconds", str(seconds)]
    command += ["--batches", ",".join(map(str, batches)), "--new-tokens", str(new_tokens)]
    return run_bounded(command, part, seconds)
