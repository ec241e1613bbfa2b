"""Greedy ids through prefill and decode with stages on several GPUs, against those of the plain model."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graftline.bench.gpu_configs import CHAIN, Setting
from graftline.bench.gpu_parity import MAX_TOKENS, NUM_PROMPTS, cpu_ids, parity_prompts, shipped_ids
from graftline.bench.gpu_steps import Steps
from graftline.bench.gpu_workers import worker_pair
from graftline.bench.multi_gpu_configs import decode_over, prefill_over
from graftline.engine.models.checkpoint import Checkpoint, open_checkpoint

CONCURRENCIES = (8, 1)


def measure_parity(
    steps: Steps,
    model: Path,
    head: Path | None,
    devices: Sequence[str],
    *,
    num_prompts: int = NUM_PROMPTS,
    max_tokens: int = MAX_TOKENS,
) -> None:
    """Prefill stages {1, 2} x decode stages 2, float32, at concurrency 8 and 1.

    With more than two devices also a stage of decode on each but the first, and on each.
    """
    checkpoint = open_checkpoint(model)
    prompts = _prompts(checkpoint, num_prompts)
    shipped = shipped_ids(checkpoint, prompts, max_tokens)
    steps.note("expected", "computed here" if shipped is None else "shipped")
    expected = shipped if shipped is not None else cpu_ids(checkpoint, prompts, max_tokens)
    threads = 1 if devices[0] == "cpu" else 4
    setting = Setting(model, head, devices[0], "float32", num_pages=1024, max_running=8, threads=threads)
    more = [(1, len(devices) - 1), (2, len(devices))]
    for prefills, decodes in dict.fromkeys([(1, 2), (2, 2), *(more if len(devices) > 2 else [])]):
        name = f"prefill stages {prefills}, decode stages {decodes}"
        places = devices[:prefills], devices[-decodes:]
        steps.step(name, partial(_compare, setting, *places, prompts, expected))


def _compare(
    setting: Setting,
    prefill_devices: Sequence[str],
    decode_devices: Sequence[str],
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
) -> dict[str, Any]:
    tree = CHAIN if setting.head is not None else None
    # With two devices the prefill shares them with the decode: both are small in float32.
    prefill = prefill_over(setting, tree, prefill_devices)
    decode = decode_over(setting, tree, decode_devices, device_rounds=True)
    found: dict[str, Any] = {"prompts": len(prompts), "tokens": len(expected[0])}
    with worker_pair(prefill, decode) as pair:
        for concurrency in CONCURRENCIES:
            answers = pair.run(prompts, len(expected[0]), concurrency=concurrency)
            pairs = enumerate(zip(expected, (answer.ids for answer in answers), strict=True))
            differing = [
                {"prompt": index, "at": _parting(wanted, ids)} for index, (wanted, ids) in pairs if list(wanted) != ids
            ]
            found[f"concurrency {concurrency}"] = {"equal": len(prompts) - len(differing), "differing": differing}
            rounds = sum(answer.speculation.rounds for answer in answers)
            accepted = sum(answer.speculation.accepted for answer in answers)
            found[f"accept length at concurrency {concurrency}"] = (accepted + rounds) / rounds if rounds else None
    return found


def _parting(expected: Sequence[int], actual: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), len(actual))


def _prompts(checkpoint: Checkpoint, count: int) -> list[list[int]]:
    """Held-out prompts where the vocabulary is one of text, else ids drawn at random."""
    vocab = checkpoint.config.vocab_size
    if vocab > 1000:
        return parity_prompts(checkpoint, count)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 40, (count,), generator=generator).tolist()
    return [torch.randint(2, vocab - 2, (length,), generator=generator).tolist() for length in lengths]
