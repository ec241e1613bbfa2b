"""How many layers each stage gets."""

from collections.abc import Sequence
from itertools import pairwise

from graftline.engine.draft_head.config import DraftHeadConfig, DraftHeadKind
from graftline.engine.models.config import ModelConfig
from graftline.engine.models.hybrid_figures import active_layer_weights
from graftline.engine.tree_shape import TreeShape
from graftline.errors import InvalidRequestError


def automatic_split(num_layers: int, num_stages: int, last_stage_cost: float) -> tuple[int, ...]:
    """Splits layers evenly in cost, the last stage paying for head and drafter besides.

    Args:
        last_stage_cost: cost of head and drafter, in layers.

    Returns:
        Layers per stage, each at least one; the slowest stage is as fast as it can be.

    Raises:
        InvalidRequestError: more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise InvalidRequestError("num_stages", f"{num_stages} stages for {num_layers} layers")
    last = max(1, round((num_layers + last_stage_cost) / num_stages - last_stage_cost))
    if num_stages == 1:
        last = num_layers
    else:
        last = min(last, num_layers - (num_stages - 1))
        last = min(
            (count for count in (last - 1, last, last + 1) if 1 <= count <= num_layers - (num_stages - 1)),
            key=lambda count: (max(count + last_stage_cost, _ceil_div(num_layers - count, num_stages - 1)), -count),
        )
    before = num_layers - last
    bounds = [before * stage // (num_stages - 1) for stage in range(num_stages)] if num_stages > 1 else [0]
    return (*(end - start for start, end in pairwise(bounds)), last)


def last_stage_cost(model: ModelConfig, head: DraftHeadConfig | None, tree: TreeShape) -> float:
    """Cost of head and drafter in target layers, counted in weights that one request's round reads.

    Reading weights is what decoding is bound by. Of a layer with experts the more is read the more rows pass it: all
    nodes of the tree in a target layer, one row a level in the drafter.
    """
    layer = float(model.hidden_size * (2 * model.q_size + 2 * model.kv_size + 3 * model.intermediate_size))
    if model.hybrid is not None:
        layer = active_layer_weights(model, tree.nodes)
    cost = model.vocab_size * model.hidden_size
    if head is not None:
        width = head.hidden_size * (1 if head.kind is DraftHeadKind.EAGLE else 2)
        attention = (head.num_heads + 2 * head.num_kv_heads) * head.head_dim * width
        attention += head.num_heads * head.head_dim * head.hidden_size
        draft_layer = attention + 3 * head.hidden_size * head.intermediate_size
        cost += tree.depth * (draft_layer + head.draft_vocab_size * head.hidden_size)
    return cost / layer


def parse_split(text: str) -> tuple[int, ...]:
    """`"10,12,8"` as layer counts.

    Raises:
        InvalidRequestError: not a list of positive integers.
    """
    try:
        split = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequestError("layer_split", f"{text!r} is not a list of integers") from error
    if min(split) < 1:
        raise InvalidRequestError("layer_split", f"{text!r}: every stage needs a layer")
    return split


def check_split(split: Sequence[int], num_layers: int) -> None:
    """Raises InvalidRequestError unless the split covers the model's layers exactly."""
    if sum(split) != num_layers:
        raise InvalidRequestError("layer_split", f"{tuple(split)} sums to {sum(split)}, the model has {num_layers}")


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
