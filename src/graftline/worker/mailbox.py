"""Messages on their way to a state machine, which takes them one after another."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Mailbox(Generic[Message]):
    """Hands on what is posted, from one thread. What is posted while a message is dealt with waits for its end.

    Args:
        take: deals with a message. One over which it raises is gone; those behind it come with the next one posted.
    """

    __slots__ = ("_is_taking", "_take", "_waiting")

    def __init__(self, take: Callable[[Message], None]) -> None:
        self._take = take
        self._waiting: deque[Message] = deque()
        self._is_taking = False

    def post(self, message: Message) -> None:
        """Has a message dealt with, at once unless another one is; raises what `take` does."""
        self._waiting.append(message)
        if self._is_taking:
            return
        self._is_taking = True
        try:
            while self._waiting:
                self._take(self._waiting.popleft())
        finally:
            self._is_taking = False
