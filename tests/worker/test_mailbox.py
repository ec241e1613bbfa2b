"""Messages to a state machine, one at a time."""

import pytest

from graftline.worker.mailbox import Mailbox


def test_what_a_message_posts_is_dealt_with_behind_it() -> None:
    taken: list[str] = []

    def take(message: str) -> None:
        if message == "first":
            box.post("second")
        taken.append(message)

    box = Mailbox(take)
    box.post("first")
    assert taken == ["first", "second"]


def test_a_message_that_fails_keeps_nobody_back() -> None:
    """Neither those that were posted in dealing with it, nor those that come later."""
    taken: list[str] = []

    def take(message: str) -> None:
        if message == "bad":
            box.post("behind it")
            raise ValueError(message)
        taken.append(message)

    box = Mailbox(take)
    with pytest.raises(ValueError, match="bad"):
        box.post("bad")
    box.post("next")
    assert taken == ["behind it", "next"]
