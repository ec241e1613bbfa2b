"""How much scratch growing trees takes: pages behind a drafter's own that no allocator hands out."""

from graftline.engine.pages import num_pages_for
from graftline.engine.tree_shape import TreeShape


def scratch_pages_for(shape: TreeShape, page_size: int, max_trees: int) -> int:
    """Scratch pages that growing `max_trees` trees at once takes: per tree a copy of the last partial page, then
    room for every row of the growth.
    """
    if shape.scratch_rows == 0:
        return 0
    return max_trees * num_pages_for(page_size - 1 + shape.scratch_rows, page_size)
