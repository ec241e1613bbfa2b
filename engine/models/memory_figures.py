"""How many bytes a dense model takes: weights a layer, ends, and KV a token. Arithmetic on the config alone."""

from dataclasses import dataclass

import torch

from graftline.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes of one model stored in one type.

    Attributes:
        layer_bytes: weights of one decoder layer.
        embedding_bytes: the token embedding.
        head_bytes: final norm and output head, alone.
        tie_embeddings: a stage with both ends holds one matrix for them.
        kv_token_layer_bytes: keys and values of one token in one layer.
    """

    layer_bytes: int
    embedding_bytes: int
    head_bytes: int
    tie_embeddings: bool
    kv_token_layer_bytes: int

    def weight_bytes(self, num_layers: int, *, with_embedding: bool, with_head: bool) -> int:
        """Weights of a stage."""
        total = num_layers * self.layer_bytes
        if with_head:
            total += self.head_bytes
        if with_embedding and not (with_head and self.tie_embeddings):
            total += self.embedding_bytes
        return total

    def kv_bytes(self, num_layers: int, num_tokens: int) -> int:
        """KV of so many tokens in so many layers."""
        return num_layers * num_tokens * self.kv_token_layer_bytes


def memory_figures(config: ModelConfig, dtype: torch.dtype, activation_dtype: torch.dtype) -> MemoryFigures:
    """Figures of a model whose matrices and KV are of `dtype`, its norms and biases of `activation_dtype`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = config.q_size + 2 * config.kv_size
    matrices = hidden * (qkv + config.q_size + 3 * inner)
    vectors = 2 * hidden
    vectors += qkv if config.attention_bias else 0
    vectors += hidden if config.output_bias else 0
    vectors += 2 * config.head_dim if config.qk_norm else 0
    vocabulary = config.vocab_size * hidden * dtype.itemsize
    return MemoryFigures(
        layer_bytes=matrices * dtype.itemsize + vectors * activation_dtype.itemsize,
        embedding_bytes=vocabulary,
        head_bytes=vocabulary + hidden * activation_dtype.itemsize,
        tie_embeddings=config.tie_embeddings,
        kv_token_layer_bytes=2 * config.kv_size * dtype.itemsize,
    )
