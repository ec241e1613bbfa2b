"""How near decode steps come to what memory allows, prefill to what the matrix units allow, and what the rest is."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graftline.bench.gpu_configs import Setting
from graftline.bench.gpu_rates import copy_bytes_per_s, matmul_flops_per_s, profile_table
from graftline.bench.gpu_stage import StageAlone
from graftline.bench.gpu_steps import Steps, settle
from graftline.engine.config import EngineConfig
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.models.config import ModelConfig
from graftline.kernels.attention_kind import AttentionBackend

_ITEM_BYTES = 2
_ROUNDS = 40
_PROMPT_TOKENS = 4096
_SHORT_PROMPTS = (32, 128, 256, 512)


def step_bytes(model: ModelConfig, batch: int, context: int) -> int:
    """Bytes that one decode step must read: every matrix but the embedding once, and the past of every request."""
    return _ITEM_BYTES * (_matrix_elements(model) + batch * context * 2 * model.kv_size * model.num_layers)


def prompt_flops(model: ModelConfig, tokens: int) -> float:
    """Operations of a prompt: products with every layer's matrices, and causal attention; the head sees one row."""
    in_layers = _matrix_elements(model) - model.vocab_size * model.hidden_size
    attention = 2 * tokens * tokens * model.q_size * model.num_layers  # half of q K^T, half of p V
    return 2.0 * in_layers * tokens + attention + 2.0 * model.vocab_size * model.hidden_size


def _matrix_elements(model: ModelConfig) -> int:
    layer = model.hidden_size * (2 * model.q_size + 2 * model.kv_size + 3 * model.intermediate_size)
    return layer * model.num_layers + model.vocab_size * model.hidden_size


def measure_roofline(
    steps: Steps,
    model_path: Path,
    device: str,
    *,
    batches: Sequence[int] = (1, 4, 16, 64),
    contexts: Sequence[int] = (1024, 8192),
    prompt_tokens: int = _PROMPT_TOKENS,
    rounds: int = _ROUNDS,
    dtype: str = "bfloat16",
) -> None:
    """Notes rates, decode steps, prompts and profiles."""
    place, model = torch.device(device), read_model_config(model_path)
    is_cuda = place.type == "cuda"
    copy = steps.step("copy bytes/s", lambda: copy_bytes_per_s(place, 2 << 30 if is_cuda else 64 << 20))
    number_type = torch.bfloat16 if is_cuda else torch.float32
    matmul = steps.step("matmul flops/s", lambda: matmul_flops_per_s(place, number_type, 8192 if is_cuda else 256))
    page_size = 16
    tail = 2 * rounds + 8
    most = max(-(-(context + tail) // page_size) * batch for batch in batches for context in contexts)
    setting = Setting(
        model_path,
        None,
        device,
        dtype=dtype,
        page_size=page_size,
        num_pages=max(most, -(-(prompt_tokens + 2) // page_size)),
        max_running=max(batches),
        chunk_tokens=prompt_tokens,
    )
    built: list[StageAlone] = []

    def build(config: EngineConfig) -> dict[str, str]:
        built.append(StageAlone(config))
        return {"attention of planned steps": built[0].attention_name}

    if steps.step("decode stage", partial(build, setting.decode(max_graph_batch=max(batches)))) is not None:
        _measure_decode(steps, built.pop(), model, batches, contexts, rounds, copy)
        settle()
    if steps.step("prefill stage", partial(build, setting.prefill())) is not None:
        _measure_prefill(steps, built.pop(), model, prompt_tokens, matmul)
        settle()
    if is_cuda:
        steps.step("prefill with triton", lambda: _prefill_with(setting, model, prompt_tokens, matmul))


def _measure_decode(
    steps: Steps,
    stage: StageAlone,
    model: ModelConfig,
    batches: Sequence[int],
    contexts: Sequence[int],
    rounds: int,
    copy: float | None,
) -> None:
    for context in contexts:
        for batch in batches:
            steps.step(
                f"decode, context {context}, batch {batch}",
                partial(_decode, stage, model, batch, context, rounds, copy),
            )
    for batch, context in ((batches[0], contexts[0]), (batches[-2:][0], contexts[-1])):
        steps.step(
            f"profile of 4 rounds, context {context}, batch {batch}", partial(_profile_rounds, stage, batch, context)
        )


def _measure_prefill(
    steps: Steps, stage: StageAlone, model: ModelConfig, prompt_tokens: int, matmul: float | None
) -> None:
    for size in dict.fromkeys((prompt_tokens, prompt_tokens // 2, 512)):
        steps.step(
            f"prefill, {prompt_tokens} tokens by {size}", partial(_prefill, stage, model, prompt_tokens, size, matmul)
        )
    for size in [size for size in _SHORT_PROMPTS if size < prompt_tokens]:
        steps.step(f"prefill, {size} tokens", partial(_prefill, stage, model, size, size, matmul))
    steps.step("profile of prefill", lambda: profile_table(stage.device, lambda: stage.prefill([prompt_tokens])))


def _decode(
    stage: StageAlone, model: ModelConfig, batch: int, context: int, rounds: int, copy: float | None
) -> dict[str, Any]:
    stage.open(batch, context, 2 * rounds + 8)
    stage.rounds(4)
    times = stage.rounds(rounds)
    num_bytes = step_bytes(model, batch, context)
    found = {**asdict(times), "bytes": num_bytes, "bytes/s": num_bytes / times.wall_s}
    if copy is not None:
        found["floor_s"] = num_bytes / copy
        found["share_of_copy_rate"] = num_bytes / copy / times.wall_s
    return found


def _prefill(stage: StageAlone, model: ModelConfig, tokens: int, size: int, matmul: float | None) -> dict[str, Any]:
    chunks = [min(size, tokens - first) for first in range(0, tokens, size)]
    stage.prefill(chunks)
    seconds = min(stage.prefill(chunks) for _ in range(3))
    rate = prompt_flops(model, tokens) / seconds
    share = None if matmul is None else rate / matmul
    return {"seconds": seconds, "flops/s": rate, "tokens/s": tokens / seconds, "share_of_matmul_rate": share}


def _prefill_with(setting: Setting, model: ModelConfig, tokens: int, matmul: float | None) -> dict[str, Any]:
    stage = StageAlone(setting.prefill(attention_backend=AttentionBackend.TRITON))
    return _prefill(stage, model, tokens, tokens, matmul)


def _profile_rounds(stage: StageAlone, batch: int, context: int) -> list[dict[str, Any]]:
    stage.open(batch, context, 16)
    stage.rounds(2)
    return profile_table(stage.device, lambda: stage.rounds(4))
