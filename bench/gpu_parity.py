"""Greedy ids through prefill and decode on a device against those of the plain model on a CPU, in float32.

`python -m graftline.bench.gpu_parity --out bench/prompts/greedy_ids.json` writes the CPU's ids, which the measurement
on a GPU then reads.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graftline.bench.baseline_models import PromptEncoder
from graftline.bench.gpu_configs import CHAIN, Setting, shape_name
from graftline.bench.gpu_pair import engine_pair
from graftline.bench.gpu_steps import Steps
from graftline.bench.prompt_set import DEFAULT_PROMPTS, read_prompts
from graftline.engine.model_fetch import resolve_model
from graftline.engine.models.checkpoint import Checkpoint, open_checkpoint
from graftline.engine.models.load import load_model
from graftline.engine.models.reference import OneRequestKv, forward, greedy
from graftline.engine.tree_shape import TreeShape

SHIPPED_IDS = DEFAULT_PROMPTS.parent / "greedy_ids.json"
NUM_PROMPTS = 20
MAX_TOKENS = 48
_MAX_PROMPT_TOKENS = 400
_TREE = TreeShape(4, 2, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """A way through the engines. `stages` are those of the decode."""

    tree: TreeShape | None
    stages: int = 1
    rounds: bool = True
    graphs: bool = True
    overlap: bool = True
    together: bool = True

    @property
    def name(self) -> str:
        """What the results call it."""
        flags = [f"{self.stages} stages", "rounds" if self.rounds else "planned"]
        if self.rounds:
            flags += [f"graphs {_on(self.graphs)}", f"overlap {_on(self.overlap)}"]
        return f"{shape_name(self.tree)}, {', '.join(flags)}, {'batch' if self.together else 'one by one'}"


CASES = (
    Case(CHAIN),
    Case(None),
    Case(_TREE),
    Case(CHAIN, overlap=False),
    Case(CHAIN, graphs=False),
    Case(CHAIN, graphs=False, overlap=False),
    Case(_TREE, stages=2),
    Case(CHAIN, rounds=False),
    Case(_TREE, rounds=False, together=False),
    Case(CHAIN, stages=2, overlap=False, together=False),
)
"""The most telling first."""


def parity_prompts(checkpoint: Checkpoint, count: int = NUM_PROMPTS) -> list[list[int]]:
    """Ids of the first held-out prompts that are short enough, kinds taking turns."""
    encoder = PromptEncoder(checkpoint)
    ids = (encoder.encode(prompt) for prompt in read_prompts(DEFAULT_PROMPTS).prompts)
    return [prompt for prompt in ids if len(prompt) <= _MAX_PROMPT_TOKENS][:count]


def cpu_ids(checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy ids of the plain float32 model on the CPU, one request at a time."""
    model = load_model(checkpoint, range(checkpoint.config.num_layers), torch.float32)
    with torch.inference_mode():
        return [greedy(model, prompt, max_tokens) for prompt in prompts]


def shipped_ids(checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]] | None:
    """The CPU's ids from the file, when they are of this model and these prompts."""
    if not SHIPPED_IDS.is_file():
        return None
    shipped = json.loads(SHIPPED_IDS.read_text(encoding="utf-8"))
    if shipped["model_hash"] != checkpoint.model_hash or shipped["max_tokens"] < max_tokens:
        return None
    known = {tuple(prompt): ids for prompt, ids in zip(shipped["prompts"], shipped["ids"], strict=True)}
    if any(tuple(prompt) not in known for prompt in prompts):
        return None
    return [known[tuple(prompt)][:max_tokens] for prompt in prompts]


def ids_file(model_hash: str, prompts: Sequence[Sequence[int]], ids: Sequence[Sequence[int]]) -> str:
    """The text that `shipped_ids` reads, a line a prompt and a line an answer."""
    lists = {"prompts": prompts, "ids": ids}
    parts = [f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for name, rows in lists.items()]
    head = f'"model_hash": {json.dumps(model_hash)}, "max_tokens": {len(ids[0])}'
    return "{" + ",\n".join([head, *parts]) + "}\n"


def measure_parity(
    steps: Steps,
    model: Path,
    head: Path | None,
    device: str,
    *,
    num_prompts: int = NUM_PROMPTS,
    max_tokens: int = MAX_TOKENS,
) -> None:
    """Every case, noted by its name."""
    checkpoint = open_checkpoint(model)
    prompts = parity_prompts(checkpoint, num_prompts)
    shipped = shipped_ids(checkpoint, prompts, max_tokens)
    steps.note("expected", "computed here" if shipped is None else SHIPPED_IDS.name)
    expected = shipped if shipped is not None else cpu_ids(checkpoint, prompts, max_tokens)
    setting = Setting(model, head, device, dtype="float32", num_pages=2048, max_running=8)
    for case in CASES:
        if case.tree is None or head is not None:
            steps.step(case.name, partial(run_case, case, setting, checkpoint, prompts, expected))


def run_case(
    case: Case,
    setting: Setting,
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """How many answers equal the expected ones, and where the others part from them."""
    decode = setting.decode(
        case.tree, case.stages, device_rounds=case.rounds, cuda_graphs=case.graphs, overlap=case.overlap
    )
    max_tokens = len(expected[0])
    groups = [list(prompts)] if case.together else [[prompt] for prompt in prompts]
    with engine_pair(setting.prefill(case.tree), decode) as pair:
        answers = [answer for group in groups for answer in pair.run(group, max_tokens)]
    differing = [
        _parting(index, checkpoint, prompts[index], expected[index], answer.ids)
        for index, answer in enumerate(answers)
        if answer.ids != list(expected[index])
    ]
    rounds = sum(answer.speculation.rounds for answer in answers)
    accepted = sum(answer.speculation.accepted for answer in answers)
    return {
        "prompts": len(prompts),
        "tokens": max_tokens,
        "equal": len(prompts) - len(differing),
        "differing": differing,
        "accept_length": (accepted + rounds) / rounds if rounds else None,
    }


def _parting(
    index: int, checkpoint: Checkpoint, prompt: Sequence[int], expected: Sequence[int], actual: Sequence[int]
) -> dict[str, Any]:
    """Where two answers part, and by how much the CPU preferred its own token there: a near-tie says little."""
    at = next((n for n, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), len(actual))
    found: dict[str, Any] = {"prompt": index, "at": at, "lengths": [len(expected), len(actual)]}
    if at < min(len(expected), len(actual)):
        model = load_model(checkpoint, range(checkpoint.config.num_layers), torch.float32)
        ids = [*prompt, *expected[:at]]
        with torch.inference_mode():
            logits = forward(model, ids, 0, OneRequestKv(model, len(ids)))[-1]
        found |= {"expected": expected[at], "actual": actual[at]}
        found["margin"] = float(logits[expected[at]] - logits[actual[at]])
    return found


def _on(value: bool) -> str:
    return "on" if value else "off"


def main() -> None:
    """Writes the CPU's ids."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=SHIPPED_IDS)
    parser.add_argument("--model", default="smollm2-135m")
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(resolve_model(arguments.model))
    prompts = parity_prompts(checkpoint)
    ids = cpu_ids(checkpoint, prompts, MAX_TOKENS)
    arguments.out.write_text(ids_file(checkpoint.model_hash, prompts, ids), encoding="utf-8")


if __name__ == "__main__":
    main()
