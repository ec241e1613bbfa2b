"""The nouns of a request inside a worker: who it is, how it samples, when it ends, what it yields.

Knows no gRPC and no tensors; services translate messages to and from these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

RequestId = NewType("RequestId", str)
SlotId = NewType("SlotId", int)
PageId = NewType("PageId", int)


@dataclass(frozen=True, slots=True)
class RequestKey:
    """One attempt of one request; nothing of an older attempt counts for a newer one."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn; see `graftline.kernels.sample` for the exact function.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is no limit.
        top_p: in (0, 1]; 1 is no limit.
        min_p: in [0, 1]; 0 is no limit.
        seed: keys the noise together with the position.
        logit_bias: token id -> value added to its logit first.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a request ends, as far as token ids can tell.

    Attributes:
        max_tokens: output tokens of the whole request, earlier attempts included.
        min_tokens: `stop_token_ids` and `eos_token_ids` cannot be drawn before this many output tokens.
        eos_token_ids: empty when the request ignores them.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def ending_ids(self) -> frozenset[int]:
        """Every token id that ends the request."""
        return self.stop_token_ids | self.eos_token_ids


@dataclass(frozen=True, slots=True)
class Request:
    """What a worker is asked to do. Token ids are the user's prompt plus what earlier attempts emitted.

    Attributes:
        num_prompt_tokens: length of the user's own prompt within `token_ids`.
        logprobs: number of top logprobs a token, or None for none at all.
    """

    key: RequestKey
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: Sampling
    stopping: Stopping
    logprobs: int | None = None

    @property
    def num_earlier_tokens(self) -> int:
        """Output tokens that earlier attempts emitted."""
        return len(self.token_ids) - self.num_prompt_tokens


class FinishReason(Enum):
    """Why a request ended well."""

    STOP = "stop"
    LENGTH = "length"


class TreeOrigin(Enum):
    """Where the tree of the first decode round came from."""

    NONE = "none"
    REAL = "real"
    ROOT_ONLY = "root-only"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Logprob of an emitted token under the unmodified distribution, and the best tokens of that position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """An emitted token."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class DraftTree:
    """`V` nodes: node 0 is the bonus token, `parents[0] == -1`, `parents[i] < i`.

    Raises:
        ValueError: if the parents do not form such a tree.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree of {len(self.tokens)} tokens and {len(self.parents)} parents")
        if self.parents[0] != -1:
            raise ValueError(f"the root's parent is {self.parents[0]}, not -1")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}")

    @classmethod
    def root_only(cls, token_id: int) -> "DraftTree":
        """The cold start: nothing but the bonus token."""
        return cls((token_id,), (-1,))

    @property
    def num_nodes(self) -> int:
        """Nodes including the root."""
        return len(self.tokens)

    def depths(self) -> tuple[int, ...]:
        """Distance of every node from the root."""
        depths = [0] * len(self.parents)
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return max(self.depths())

    def pruned(self, max_depth: int) -> "DraftTree":
        """The nodes at most `max_depth` below the root, in their order."""
        if max_depth >= self.num_nodes - 1:
            return self
        depths = self.depths()
        kept = [node for node, depth in enumerate(depths) if depth <= max_depth]
        if len(kept) == len(depths):
            return self
        new_index = {node: index for index, node in enumerate(kept)}
        return DraftTree(
            tuple(self.tokens[node] for node in kept),
            tuple(new_index.get(self.parents[node], -1) for node in kept),
        )
