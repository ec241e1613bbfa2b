"""Speculation figures of one choice, summed over its attempts."""

from graftline.proto.v1.common_pb2 import SpeculationStats, TreeOrigin

# What the attempts so far say when none of them got as far as a tree.
_NO_TREE_YET = (TreeOrigin.TREE_ORIGIN_UNSPECIFIED, TreeOrigin.TREE_ORIGIN_NONE)


class SpeculationFigures:
    """Sums what decodes report. An attempt that ends without a report (its decode died, or a stop string cut it)
    is counted from its messages: after the first token, each carries one round.

    Args:
        draft_nodes: nodes of a draft tree, root included; 0 or 1 when there is no speculation.
    """

    def __init__(self) -> None:
        self.total = SpeculationStats()
        self._has_ended = False
        self.attempt_started(0)

    def attempt_started(self, draft_nodes: int) -> None:
        """A new attempt begins."""
        self._num_drafts = max(0, draft_nodes - 1)
        self._num_messages = 0
        self._num_accepted = 0
        self._num_first_accepted = 0

    def tokens_came(self, num_tokens: int) -> None:
        """A message with tokens arrived."""
        self._num_messages += 1
        if self._num_messages == 1 or not self._num_drafts:
            return
        self._num_accepted += num_tokens - 1
        if self._num_messages == 2:
            self._num_first_accepted = num_tokens - 1

    def attempt_ended(self, reported: SpeculationStats | None) -> None:
        """Adds the attempt: what its decode reported, otherwise what was seen."""
        stats = self._seen() if reported is None else reported
        if not self._has_ended:
            self._has_ended = True
            self.total.CopyFrom(stats)
            return
        for name in ("rounds", "drafted", "accepted", "first_round_drafted", "first_round_accepted"):
            setattr(self.total, name, getattr(self.total, name) + getattr(stats, name))
        if self.total.tree_origin in _NO_TREE_YET:
            self.total.tree_origin = stats.tree_origin

    def _seen(self) -> SpeculationStats:
        if self._num_messages < 2 or not self._num_drafts:
            return SpeculationStats()
        rounds = self._num_messages - 1
        return SpeculationStats(
            rounds=rounds,
            drafted=rounds * self._num_drafts,
            accepted=self._num_accepted,
            first_round_drafted=self._num_drafts,
            first_round_accepted=self._num_first_accepted,
        )
