"""What the device knows of every running request between two rounds of fixed shape.

A round reads its sequences' rows of these tables and writes them back; the host writes only rows of requests whose
values it knows better (a handoff just ended, or a step of another kind came between).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from graftline.engine.pages import num_pages_for
from graftline.engine.plan import PageChange, Segment, SlotOpening
from graftline.engine.round_order import RoundOrder
from graftline.engine.tree_shape import TreeShape
from graftline.kernels.round_open import OpenRounds, RoundLayout, open_rounds
from graftline.kernels.round_walk import WalkedRounds, close_rounds
from graftline.kernels.sample import SamplingRows
from graftline.kernels.upload import RecurringUploads, upload


class RoundState:
    """Tables of all request slots and, behind them, one for padding and one for rows that nobody wants.

    Args:
        num_slots: request slots.
        max_len: most tokens of prompt and output of a request.
        shape: of the trees.

    Attributes:
        path_len: most tokens a round emits for a request, the first one included.
    """

    def __init__(self, num_slots: int, max_len: int, shape: TreeShape, page_size: int, device: torch.device) -> None:
        self.shape = shape
        self.path_len = shape.longest_path_len
        self.page_size = page_size
        self.device = device
        self.padding_slot = num_slots
        self.unwanted_slot = num_slots + 1
        self.order = RoundOrder(device)
        # Rounds run ahead of the host: one more tree than the last that counts may be written.
        self.max_pages = num_pages_for(max_len + 2 * (self.path_len + shape.nodes), page_size)
        self.layout = layout = RoundLayout(self.path_len, shape.nodes)
        self._rows = torch.zeros(num_slots + 2, layout.width, dtype=torch.int64, device=device)
        self._rows[:, layout.accepted_at : layout.tokens_at] = -1
        self._pages = torch.zeros(num_slots + 2, self.max_pages, dtype=torch.int32, device=device)
        self._limits = torch.zeros(num_slots + 2, 3, dtype=torch.float32, device=device)  # temperature, top_p, min_p
        self._limits[:, 1] = 1.0
        self._draws = torch.zeros(num_slots + 2, 2, dtype=torch.int64, device=device)  # top_k, seed

    def open(self, openings: Sequence[SlotOpening]) -> None:
        """Requests take slots: how they are sampled."""
        if not openings:
            return
        slots = upload([opening.slot for opening in openings], torch.int64, self.device)
        limits = [[opening.temperature, opening.top_p, opening.min_p] for opening in openings]
        draws = [[opening.top_k, _signed(opening.seed)] for opening in openings]
        self._limits.index_copy_(0, slots, upload(limits, torch.float32, self.device))
        self._draws.index_copy_(0, slots, upload(draws, torch.int64, self.device))

    def change_pages(self, changes: Sequence[PageChange]) -> None:
        """Page tables get longer."""
        places: list[int] = []
        pages: list[int] = []
        for change in changes:
            known = change.page_ids[: max(0, self.max_pages - change.first_index)]
            first = change.slot * self.max_pages + change.first_index
            places += range(first, first + len(known))
            pages += known
        if not pages:
            return
        values = upload(places + pages, torch.int64, self.device)
        self._pages.view(-1).index_copy_(0, values[: len(places)], values[len(places) :].int())

    def begin(self, segments: Sequence[Segment], slots: Tensor, uploads: RecurringUploads, *, tell: bool) -> None:
        """Readies a round.

        Args:
            segments: its requests; those that carry nothing from the device bring their values.
            slots: [sequences] int64, filled with the requests' slots, then with padding.
            uploads: of the calling thread.
            tell: take those values in; False where another stage has.
        """
        padded = [segment.slot for segment in segments]
        padded += [self.padding_slot] * (slots.shape[0] - len(padded))
        told = [segment for segment in segments if tell and not segment.carry]
        slots.copy_(uploads.of(padded))
        if told:
            rows = upload([[segment.slot, *self._row(segment)] for segment in told], torch.int64, self.device)
            self._rows.index_copy_(0, rows[:, 0], rows[:, 1:])

    def read(self, slots: Tensor, nodes: int) -> OpenRounds:
        """The values of [sequences] slots, as of this point of the device's stream; of trees the first `nodes`."""
        return open_rounds(self._rows, self._pages, slots, self.layout, self.page_size, nodes)

    def write(self, slots: Tensor, walked: WalkedRounds, tokens: Tensor, parents: Tensor, num_nodes: Tensor) -> Tensor:
        """Keeps what a round left and the trees that come next; see `close_rounds`."""
        return close_rounds(self._rows, slots, self.padding_slot, self.layout, walked, tokens, parents, num_nodes)

    def put(self, slots: Tensor, rows: Tensor) -> None:
        """Takes over rows that another stage's `write` left: [slots, layout.width]."""
        self._rows.index_copy_(0, slots, rows)

    def sampling(self, slots: Tensor) -> SamplingRows:
        """Sampling parameters of [rows] slots."""
        limits, draws = self._limits[slots], self._draws[slots]
        return SamplingRows(
            temperature=limits[:, 0].contiguous(),
            top_k=draws[:, 0].int(),
            top_p=limits[:, 1].contiguous(),
            min_p=limits[:, 2].contiguous(),
            seed=draws[:, 1].contiguous(),
            is_greedy=False,
        )

    def _row(self, segment: Segment) -> list[int]:
        assert segment.parents is not None, "a round verifies trees"
        assert segment.num_rows <= self.shape.nodes, f"{segment.num_rows} nodes in trees of {self.shape.nodes}"
        accepted = [*segment.accepted, *[-1] * (self.path_len - len(segment.accepted))]
        filler = [0] * (self.shape.nodes - segment.num_rows)
        return [segment.start, segment.num_rows, *accepted, *segment.tokens, *filler, *segment.parents, *filler]


def _signed(seed: int) -> int:
    """64 bits of a seed as int64."""
    return ((seed + (1 << 63)) % (1 << 64)) - (1 << 63)
