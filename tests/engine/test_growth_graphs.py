"""Growths of trees, padded to sizes that were captured."""

import torch
from torch import Tensor

from graftline.engine.growth_graphs import GrowthGraphs

CPU = torch.device("cpu")


class Growth:
    """Stands for a growth: answers with what it was told of every root, and remembers its page tables."""

    def __init__(self) -> None:
        self.tables: list[Tensor] = []

    def grow(
        self, outputs: Tensor, bonus_tokens: Tensor, lengths: Tensor, tables: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.tables.append(tables.clone())
        tokens = torch.stack((bonus_tokens, outputs[:, 0].long()), dim=1)
        return tokens, torch.zeros_like(tokens), lengths.long()


def test_trees_are_padded_to_a_size() -> None:
    growth = Growth()
    graphs = GrowthGraphs(growth, 2, torch.float32, 5, CPU)  # type: ignore[arg-type]
    assert graphs.max_trees == 0
    assert graphs.capture([4, 1]) == 0
    assert graphs.max_trees == 4
    outputs = torch.tensor([[5.0, 0], [6, 0], [7, 0]])
    trees = graphs.grow(outputs, torch.tensor([50, 60, 70]), [8, 3, 20], [[1, 2], [4], [6, 7, 8, 9, 10, 11, 12]])
    assert trees.tolist() == [[8, 50, 5, 0, 0], [3, 60, 6, 0, 0], [20, 70, 7, 0, 0]]
    assert growth.tables[-1][:, :2].tolist() == [[1, 2], [4, 0], [6, 7], [0, 0]]
    assert growth.tables[-1][2].tolist() == [6, 7, 8, 9, 10]
    alone = graphs.grow(outputs[:1], torch.tensor([51]), [2], [[3]])
    assert alone.tolist() == [[2, 51, 5, 0, 0]]
    assert growth.tables[-1].shape == (1, 5)


def test_a_size_that_is_not_full_grows_nothing_of_what_was_there() -> None:
    growth = Growth()
    graphs = GrowthGraphs(growth, 1, torch.float32, 3, CPU)  # type: ignore[arg-type]
    graphs.capture([2])
    graphs.grow(torch.ones(2, 1), torch.tensor([1, 2]), [9, 9], [[1], [2]])
    seen: list[list[int]] = []
    growth.grow = lambda outputs, bonus, lengths, tables: (  # type: ignore[method-assign]
        seen.append(lengths.tolist()),
        (bonus.unsqueeze(1), bonus.unsqueeze(1), lengths.long()),
    )[1]
    assert graphs.grow(torch.ones(1, 1), torch.tensor([3]), [4], [[1]]).tolist() == [[4, 3, 3]]
    assert seen == [[4, 0]]
