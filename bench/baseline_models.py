"""What baselines compute: transformers' `generate`, plain and with prompt lookup, and our own loop without speculation.

All of them run the same dequantised weights, one request at a time. Imports torch; runs in a child process.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from graftline.bench.baseline_protocol import BaselineKind, BaselineSettings
from graftline.bench.prompt_set import Prompt
from graftline.engine.models.checkpoint import Checkpoint, open_checkpoint
from graftline.engine.models.config import ModelConfig
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.reference import OneRequestKv, forward
from graftline.engine.models.rope import LinearScaling, Llama3Scaling, Rope
from graftline.errors import IncompatibleError, InvalidRequestError
from graftline.kernels.sample import build_sampling_rows, sample
from graftline.router.text.chat_template import ChatTemplate, Message
from graftline.router.text.tokenizer import TextTokenizer

Emit = Callable[[Sequence[int]], None]
"""Told of new output ids the moment they exist."""


class BaselineModel(Protocol):
    """One way to generate."""

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, *, ignore_eos: bool, emit: Emit) -> None:
        """Greedy output for one prompt, at most `max_tokens` ids, the ending id included."""


class PromptEncoder:
    """Prompts to token ids, exactly as the router does it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        card = checkpoint.card
        self._tokenizer = TextTokenizer(card.tokenizer_json, card.bos_token_id)
        self._template = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template else None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InvalidRequestError: chat messages for a model without a chat template.
        """
        if prompt.token_ids:
            return list(prompt.token_ids)
        if prompt.text:
            return self._tokenizer.encode_text(prompt.text)
        if self._template is None:
            raise InvalidRequestError("messages", "the model has no chat template")
        turns = [Message(turn.role, turn.content) for turn in prompt.messages]
        return self._tokenizer.encode_chat(self._template.render(turns, self._tokenizer.special_tokens))


class PlainLoop:
    """Our own model in one process: one token a forward, no speculation, no stages."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._model = DenseModel(checkpoint, range(checkpoint.config.num_layers), dtype)

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, *, ignore_eos: bool, emit: Emit) -> None:
        """See `BaselineModel`."""
        model = self._model
        greedy = build_sampling_rows([0.0], [0], [1.0], [0.0], [0], model.device)
        eos_ids = () if ignore_eos else model.config.eos_token_ids
        length = min(len(prompt_ids) + max_tokens, model.config.context_length)
        kv = OneRequestKv(model, length)
        ids = list(prompt_ids)
        computed = 0
        while len(ids) < length:
            logits = forward(model, ids[computed:], computed, kv)
            computed = len(ids)
            position = torch.tensor([computed], device=model.device)
            ids.append(int(sample(logits[-1:], greedy, position)))
            emit(ids[-1:])
            if ids[-1] in eos_ids:
                break


class TransformersModel:
    """transformers' `generate` with its KV cache.

    Args:
        lookup_tokens: drafts per round of its prompt lookup; None for plain generation.

    Raises:
        IncompatibleError: transformers is not installed.
        InvalidRequestError: a model whose config cannot be stated in transformers' words.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, lookup_tokens: int | None) -> None:
        try:
            import transformers
        except ImportError as error:
            raise IncompatibleError(
                ("transformers",), "this baseline needs transformers: pip install 'graftline[dev]'"
            ) from error
        transformers.logging.set_verbosity_error()
        self._streamer_class: type[Any] = transformers.generation.streamers.BaseStreamer
        self._eos_ids = list(checkpoint.config.eos_token_ids)
        self._lookup_tokens = lookup_tokens
        self._model = load_transformers(checkpoint, dtype)

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, *, ignore_eos: bool, emit: Emit) -> None:
        """See `BaselineModel`."""
        ids = torch.tensor([list(prompt_ids)])
        lookup = {} if self._lookup_tokens is None else {"prompt_lookup_num_tokens": self._lookup_tokens}
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=max_tokens,
            eos_token_id=None if ignore_eos else self._eos_ids,
            pad_token_id=0,
            streamer=_streamer(self._streamer_class, emit),
            **lookup,
        )


def open_baseline(settings: BaselineSettings) -> tuple[BaselineModel, PromptEncoder]:
    """Loads what `settings` names.

    Raises:
        InvalidRequestError, IncompatibleError: see `TransformersModel` and `open_checkpoint`.
    """
    checkpoint = open_checkpoint(Path(settings.model))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype.value]
    model: BaselineModel
    match settings.kind:
        case BaselineKind.PLAIN_LOOP:
            model = PlainLoop(checkpoint, dtype)
        case BaselineKind.TRANSFORMERS:
            model = TransformersModel(checkpoint, dtype, None)
        case BaselineKind.PROMPT_LOOKUP:
            model = TransformersModel(checkpoint, dtype, settings.lookup_tokens)
    return model, PromptEncoder(checkpoint)


def load_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """A transformers model with the weights of `checkpoint`, on the CPU, ready to generate.

    Raises:
        InvalidRequestError: see `TransformersModel`.
    """
    import transformers

    if (checkpoint.path / "config.json").is_file():
        config = transformers.AutoConfig.from_pretrained(checkpoint.path)
    else:
        config = transformers.AutoConfig.for_model(**transformers_config(checkpoint.config))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config = transformers.GenerationConfig()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.tensor(name))
    return model


def transformers_config(config: ModelConfig) -> dict[str, Any]:
    """A dense config in transformers' words (`model_type` included), for models that come without a config.json.

    Raises:
        InvalidRequestError: a rope scaling that transformers cannot be told of.
    """
    return {
        "model_type": config.family.value,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _rope_parameters(config.rope),
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _rope_parameters(rope: Rope) -> dict[str, Any]:
    match rope.scaling:
        case None:
            return {"rope_type": "default", "rope_theta": rope.theta}
        case LinearScaling(factor):
            return {"rope_type": "linear", "rope_theta": rope.theta, "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "rope_theta": rope.theta,
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise InvalidRequestError("model", f"a GGUF model with {type(rope.scaling).__name__} has no transformers baseline")


def _streamer(base: type[Any], emit: Emit) -> Any:
    """A transformers streamer that passes output ids on; the first thing it is given is the prompt."""

    class Streamer(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self._is_prompt = True

        def put(self, value: torch.Tensor) -> None:
            if not self._is_prompt:
                emit(value.flatten().tolist())
            self._is_prompt = False

        def end(self) -> None:
            pass

    return Streamer()
