"""What a process that serves no longer looks through."""

import gc

from graftline.engine.process_memory import keep_what_is_there


def test_what_was_there_is_left_alone_and_the_rest_is_collected() -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    kept = Node()
    try:
        keep_what_is_there()
        later = Node()
        tracked = gc.get_objects()
        assert not any(found is kept for found in tracked)
        assert any(found is later for found in tracked)
    finally:
        gc.unfreeze()
    assert any(found is kept for found in gc.get_objects())
