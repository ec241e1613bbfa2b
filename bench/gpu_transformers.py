"""Hugging Face transformers' `generate` on a GPU beside our engines: same weights, prompts, precision, batch sizes.

Runs in a process of its own (`python -m graftline.bench.gpu_transformers --out FILE …`), which its caller may kill:
what it has found is on disk. Prompts of one batch have one length, so that nothing is padded.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from graftline.bench.baseline_models import transformers_config
from graftline.bench.gpu_parity import parity_prompts
from graftline.bench.gpu_rates import wait
from graftline.bench.gpu_steps import Steps
from graftline.engine.models.checkpoint import Checkpoint, open_checkpoint
from graftline.engine.models.dummy_checkpoint import DummyCheckpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT_TOKENS = 128
NEW_TOKENS = 128


def equal_prompts(checkpoint: Checkpoint, count: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """`count` prompts of `length` tokens: held-out text run together and cut; numbers where words mean nothing."""
    if isinstance(checkpoint, DummyCheckpoint):
        return [[(7 * row + place) % 1000 for place in range(length)] for row in range(count)]
    ids = [token for prompt in parity_prompts(checkpoint) for token in prompt]
    return [[ids[(row * length + place) % len(ids)] for place in range(length)] for row in range(count)]


def load_on(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    """A transformers model with the weights of `checkpoint`, made on the device."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**transformers_config(checkpoint.config))
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config = transformers.GenerationConfig()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.tensor(name))
    return model


def measure_generate(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, *, static: bool) -> dict[str, Any]:
    """Seconds of a call once it is warm (with a static cache: compiled), and the first answer's ids."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt) for prompt in prompts], device=device)
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    if static and device.type == "cpu":
        options["disable_compile"] = True

    def call(count: int) -> torch.Tensor:
        made: torch.Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            min_new_tokens=count,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        wait(device)
        return made[:, ids.shape[1] :]

    started = time.perf_counter()
    if static:  # compiles, then captures
        call(new_tokens)
        call(new_tokens)
    else:
        call(4)
    warmed = time.perf_counter()
    made = call(new_tokens)
    ended = time.perf_counter()
    seconds = min(ended - warmed, _again(call, new_tokens))
    first = _again(call, 1)
    count = made.numel()
    return {
        "batch": len(prompts),
        "prompt_tokens": ids.shape[1],
        "new_tokens": new_tokens,
        "warm_up_s": warmed - started,
        "seconds": seconds,
        "tokens/s": count / seconds,
        "tpot_s": (seconds - first) / (new_tokens - 1),
        "ids": made[0].tolist(),
    }


def _again(call: Any, count: int) -> float:
    started = time.perf_counter()
    call(count)
    return time.perf_counter() - started


def main() -> None:
    """Measures every batch size with a dynamic and with a static, compiled cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--cache", choices=("static", "dynamic"), required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    arguments = parser.parse_args()
    steps = Steps(arguments.out, arguments.seconds)
    checkpoint = open_checkpoint(arguments.model)
    model = load_on(checkpoint, DTYPES[arguments.dtype], torch.device(arguments.device))
    for batch in map(int, arguments.batches.split(",")):
        prompts = equal_prompts(checkpoint, batch)
        steps.step(
            f"transformers, {arguments.cache} cache, batch {batch}",
            lambda prompts=prompts: measure_generate(  # type: ignore[misc]
                model, prompts, arguments.new_tokens, static=arguments.cache == "static"
            ),
        )


if __name__ == "__main__":
    main()
