"""Finds stop strings in streamed text, however it is split, and holds back what might become one."""

from collections.abc import Sequence


class StopMatcher:
    """Fed with text as it comes; lets through what can no longer be part of a stop string.

    The match that *ends* first wins; of those that end together the longest one does. The result does not
    depend on how the text is split.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(dict.fromkeys(stop))
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Takes more text; returns what became final. After a match (`matched`) nothing more comes out."""
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        buffer = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := buffer.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return buffer[:start]
        num_held = max(_overlap(buffer, stop) for stop in self._stop)
        final, self._held = buffer[: len(buffer) - num_held], buffer[len(buffer) - num_held :]
        return final

    def flush(self) -> str:
        """No more text will come: what was held back is final after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
