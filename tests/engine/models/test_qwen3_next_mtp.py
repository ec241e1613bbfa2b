"""The MTP module: what it computes, written out in plain torch; and how its rows may be batched."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, sigmoid, silu, softmax

from graftline.engine.kv_pool import KvGeometry, KvPool
from graftline.engine.models.checkpoint import Checkpoint, open_checkpoint
from graftline.engine.models.load import load_model
from graftline.engine.models.qwen3_next_mtp import MtpModule
from graftline.engine.models.qwen3_next_random import write_tiny_qwen3_next
from graftline.engine.models.rope import rope_tables
from graftline.errors import InvalidRequestError
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.tree_batch import TreeBatch

PAGES = [3, 0, 2, 1]
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_tiny_qwen3_next(tmp_path_factory.mktemp("mtp"), scale=1.0))


def module(checkpoint: Checkpoint) -> MtpModule:
    model = load_model(checkpoint, range(3, 4), torch.float32)
    return MtpModule(checkpoint, torch.float32, torch.device("cpu"), model.embed, model.logits)


def pool(checkpoint: Checkpoint) -> KvPool:
    config = checkpoint.config
    return KvPool(KvGeometry(1, PAGE_SIZE, config.num_kv_heads, config.head_dim, torch.float32), 4, layers=(0,))


class Plain:
    """The module as its publishers describe it, over a whole sequence at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self.get = checkpoint.tensor

    def norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return scaled * (1 + self.get(f"mtp.{name}.weight"))

    def proj(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.get(f"mtp.{name}.weight"))

    def run(self, features: Tensor, tokens: Tensor) -> Tensor:
        embedded = self.get("model.embed_tokens.weight")[tokens]
        fused = self.proj(
            torch.cat((self.norm(embedded, "pre_fc_norm_embedding"), self.norm(features, "pre_fc_norm_hidden")), -1),
            "fc",
        )
        hidden = fused + self.attend(self.norm(fused, "layers.0.input_layernorm"))
        hidden = hidden + self.experts(self.norm(hidden, "layers.0.post_attention_layernorm"))
        return self.norm(hidden, "norm")

    def attend(self, x: Tensor) -> Tensor:
        config, rows, prefix = self.config, x.shape[0], "layers.0.self_attn"
        q, gate = self.proj(x, f"{prefix}.q_proj").view(rows, config.num_heads, -1).chunk(2, -1)
        k = self.proj(x, f"{prefix}.k_proj").view(rows, config.num_kv_heads, -1)
        v = self.proj(x, f"{prefix}.v_proj").view(rows, config.num_kv_heads, -1)
        q, k = self.turn(self.norm(q, f"{prefix}.q_norm")), self.turn(self.norm(k, f"{prefix}.k_norm"))
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("rhd,shd->hrs", q, k) * config.head_dim**-0.5
        scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)
        out = torch.einsum("hrs,shd->rhd", softmax(scores, -1), v)
        return self.proj((out * sigmoid(gate)).flatten(1), f"{prefix}.o_proj")

    def turn(self, x: Tensor) -> Tensor:
        rotated = self.config.rotary_dim
        cos, sin = (table[:, None] for table in rope_tables(self.config.rope, rotated, x.shape[0]))
        first, second, rest = x.split([rotated // 2, rotated // 2, x.shape[-1] - rotated], -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def experts(self, x: Tensor) -> Tensor:
        assert self.config.hybrid is not None
        moe, prefix = self.config.hybrid.moe, "layers.0.mlp"
        weights, ids = softmax(self.proj(x, f"{prefix}.gate"), -1).topk(moe.num_chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = sigmoid(self.proj(x, f"{prefix}.shared_expert_gate")) * self.block(x, f"{prefix}.shared_expert")
        for row, rank in ((row, rank) for row in range(x.shape[0]) for rank in range(moe.num_chosen)):
            part = self.block(x[row : row + 1], f"{prefix}.experts.{int(ids[row, rank])}")[0]
            out[row] += weights[row, rank] * part
        return out

    def block(self, x: Tensor, prefix: str) -> Tensor:
        return self.proj(
            silu(self.proj(x, f"{prefix}.gate_proj")) * self.proj(x, f"{prefix}.up_proj"), f"{prefix}.down_proj"
        )


def inputs(checkpoint: Checkpoint, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(rows, checkpoint.config.hidden_size, generator=generator)
    return features, torch.randint(0, 256, (rows,), generator=generator)


@torch.inference_mode()
def test_outputs_are_those_of_the_description(checkpoint: Checkpoint) -> None:
    features, tokens = inputs(checkpoint, 11)
    batch = build_attention_batch([SegmentRows(0, 11, PAGES)], PAGE_SIZE)
    mtp = module(checkpoint)
    out = mtp.forward(mtp.fuse(features), tokens, batch, pool(checkpoint))
    wanted = Plain(checkpoint).run(features, tokens)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    logits = linear(wanted, checkpoint.tensor("lm_head.weight"))
    torch.testing.assert_close(mtp.logits(out), logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_only_the_newest_rows_of_a_segment_are_computed(checkpoint: Checkpoint) -> None:
    features, tokens = inputs(checkpoint, 9)
    mtp, kv = module(checkpoint), pool(checkpoint)
    tree = build_attention_batch([SegmentRows(4, 5, PAGES, [-1, -1, 0, 1, 1])], PAGE_SIZE)
    early = build_attention_batch([SegmentRows(4, 2, PAGES, [-1, -1])], PAGE_SIZE)
    mtp.forward(features[:4], tokens[:4], build_attention_batch([SegmentRows(0, 4, PAGES)], PAGE_SIZE), kv)
    whole_kv = pool(checkpoint)
    whole_kv.data.copy_(kv.data)
    whole = mtp.forward(features[4:], tokens[4:], tree, whole_kv)
    first = mtp.forward(features[4:6], tokens[4:6], early, kv)
    rest = mtp.forward_newest(features[6:], tokens[6:], tree, kv, 3)
    assert torch.equal(torch.cat((first, rest)), whole)
    assert torch.equal(kv.data, whole_kv.data)


def test_a_checkpoint_without_the_module_is_refused(tmp_path: Path) -> None:
    path = write_tiny_qwen3_next(tmp_path, mtp=False)
    with pytest.raises(InvalidRequestError, match="mtp"):
        module(open_checkpoint(path))


def test_rows_of_fixed_shape_are_rows(checkpoint: Checkpoint) -> None:
    """Growth on a GPU runs the module over batches of fixed shape."""
    mtp, dim = module(checkpoint), checkpoint.config.hidden_size
    features, tokens = torch.randn(3, dim, generator=torch.Generator().manual_seed(4)), torch.tensor([5, 9, 2])
    chain = build_attention_batch([SegmentRows(0, 3, PAGES)], PAGE_SIZE)
    fixed = TreeBatch(
        positions=torch.arange(3, dtype=torch.int32),
        row_slots=chain.slots(),
        visible=torch.tensor([1, 3, 7]),
        starts=torch.zeros(1, dtype=torch.int32),
        page_tables=torch.tensor([PAGES], dtype=torch.int32),
        rows_each=3,
        num_tail=3,
        page_size=PAGE_SIZE,
    )
    expected = mtp.forward(features, tokens, chain, pool(checkpoint))
    torch.testing.assert_close(mtp.forward(features, tokens, fixed, pool(checkpoint)), expected, rtol=1e-5, atol=1e-5)
