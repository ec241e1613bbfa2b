"""GGUF files as checkpoints: names, values and row order as in the Hugging Face original."""

from functools import cached_property
from pathlib import Path

from torch import Tensor

from graftline.engine.models.card import ModelCardData, load_tokenizer
from graftline.engine.models.config import Family, ModelConfig
from graftline.engine.models.content_hash import content_hash
from graftline.engine.models.gguf_config import config_from_gguf, gguf_name
from graftline.engine.models.gguf_file import GgufFile
from graftline.engine.models.gguf_tokenizer import adds_bos, tokenizer_json
from graftline.errors import InvalidRequestError


class GgufCheckpoint:
    """See `checkpoint.Checkpoint`.

    Raises:
        InvalidRequestError: no readable GGUF file, or a model that is not supported.
    """

    def __init__(self, path: Path, model_id: str) -> None:
        self.path = path
        self._model_id = model_id
        self._file = GgufFile(path)
        if (parts := self._file.metadata.get("split.count", 1)) > 1:
            raise InvalidRequestError("model", f"{path} is one of {parts} parts; merge them into one file")
        self.config: ModelConfig = config_from_gguf(self._file)

    @cached_property
    def model_hash(self) -> str:
        """Hash of the file."""
        return content_hash([self.path], b"gguf")

    @cached_property
    def card(self) -> ModelCardData:
        """Tokenizer, template and ids, from the metadata."""
        metadata = self._file.metadata
        content = tokenizer_json(metadata)
        load_tokenizer(content, self.path)  # a router must not be the first to find out
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        return ModelCardData(
            model_id=self._model_id,
            tokenizer_json=content,
            chat_template=metadata.get("tokenizer.chat_template", ""),
            bos_token_id=bos if bos is not None and adds_bos(metadata) else -1,
            eos_token_ids=self.config.eos_token_ids,
            context_length=self.config.context_length,
            vocab_size=self.config.vocab_size,
            special_tokens=self._special_tokens(),
        )

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds the parameter of that Hugging Face name."""
        try:
            return gguf_name(name) in self._file.tensors
        except KeyError:
            return False

    def tensor(self, name: str) -> Tensor:
        """The parameter of that Hugging Face name, dequantised."""
        try:
            value = self._file.tensor(gguf_name(name))
        except KeyError as error:
            raise InvalidRequestError("model", f"{self.path} has no tensor {name}") from error
        # Converters reorder the rows of q and k for ggml's interleaved RoPE, for this architecture only.
        if self.config.family is Family.LLAMA and ".q_proj." in name:
            return split_rope_pairs(value, self.config.num_heads)
        if self.config.family is Family.LLAMA and ".k_proj." in name:
            return split_rope_pairs(value, self.config.num_kv_heads)
        return value

    def _special_tokens(self) -> dict[str, str]:
        metadata = self._file.metadata
        tokens = metadata["tokenizer.ggml.tokens"]
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
        return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def split_rope_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Interleaved RoPE rows (x0 y0 x1 y1 ...) of each head to halves (x0 x1 ... y0 y1 ...).

    Args:
        rows: [num_heads * head_dim, ...].
    """
    pairs = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, pairs, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
