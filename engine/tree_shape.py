"""The shape of draft trees: depth S, branching K, nodes V, and how deep a request's first tree is."""

import msgspec

from graftline.errors import InvalidRequestError


class TreeShape(msgspec.Struct, frozen=True):
    """How far a drafter grows.

    Attributes:
        depth: S, levels below the root.
        branching: K, children considered per node and nodes kept per level.
        nodes: V, nodes of the tree including the root. 1 turns speculation off.
        initial_depth: S of the initial tree, which a prefill grows for the first decode round, with the same K and V:
            the beginning of an answer is easier to draft than the rest. None: `depth`.

    Raises:
        InvalidRequestError: a value outside its range, naming the field.
    """

    depth: int = 3
    branching: int = 1
    nodes: int = 4
    initial_depth: int | None = None

    def __post_init__(self) -> None:
        if self.nodes == 1:
            return
        if not 1 <= self.depth <= 64:
            raise InvalidRequestError("draft_depth", f"{self.depth} is not in 1..64")
        if self.initial_depth is not None and not 1 <= self.initial_depth <= 64:
            raise InvalidRequestError("initial_tree_depth", f"{self.initial_depth} is not in 1..64")
        if not 1 <= self.branching <= 64:
            raise InvalidRequestError("draft_branching", f"{self.branching} is not in 1..64")
        if not 2 <= self.nodes <= 64:
            raise InvalidRequestError("draft_nodes", f"{self.nodes} is not in 2..64")
        if self.nodes - 1 > self.max_candidates:
            raise InvalidRequestError(
                "draft_nodes",
                f"{self.nodes} nodes cannot grow from depth {self.depth} and branching {self.branching}: "
                f"at most {self.max_candidates + 1}",
            )
        if self.initial_depth is not None and self.nodes - 1 > _candidates(self.initial_depth, self.branching):
            raise InvalidRequestError(
                "initial_tree_depth",
                f"{self.nodes} nodes cannot grow from depth {self.initial_depth} and branching {self.branching}",
            )

    @property
    def speculates(self) -> bool:
        """Whether there is anything below the root."""
        return self.nodes > 1

    @property
    def max_candidates(self) -> int:
        """Nodes that growth considers: K on the first level, K * K on every further one."""
        return _candidates(self.depth, self.branching)

    @property
    def initial(self) -> "TreeShape":
        """What a prefill grows."""
        return self if self.initial_depth is None else TreeShape(self.initial_depth, self.branching, self.nodes)

    @property
    def path_len(self) -> int:
        """Most tokens that a verify of a tree grown in a decode emits: S drafts and one more."""
        return 1 + min(self.depth, self.nodes - 1) if self.speculates else 1

    @property
    def longest_path_len(self) -> int:
        """Most tokens that any verify emits, one of an initial tree included."""
        return max(self.path_len, self.initial.path_len)

    def nodes_among(self, sequences: int, max_rows: int) -> int:
        """V of a round of so many sequences, whose verify should have at most `max_rows` rows: larger trees are cut to
        their first, likeliest nodes, but not below a chain's.

        Args:
            max_rows: 0 for no such limit.
        """
        return self.nodes if max_rows == 0 else min(self.nodes, max(self.path_len, max_rows // sequences))

    def num_drafts(self, width: int) -> int:
        """Drafts of a tree none of whose nodes has more than `width` children: K, or a smaller vocabulary."""
        return min(self.nodes - 1, _candidates(self.depth, width))

    @property
    def scratch_rows(self) -> int:
        """Drafter rows that growth writes past the committed length: K on every level but the last."""
        return (self.depth - 1) * self.branching if self.speculates else 0


def _candidates(depth: int, width: int) -> int:
    return width + (depth - 1) * width**2


NO_SPECULATION = TreeShape(depth=1, branching=1, nodes=1)
