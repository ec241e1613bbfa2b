"""Finds stop strings in streamed text, however it is split, and holds back what might become one.

Every string has a place of its own in the text (Knuth, Morris, Pratt 1977), so that a character costs the same however
long the strings are and however much is held back.
"""

from collections.abc import Sequence


class StopMatcher:
    """Fed with text as it comes; lets through what can no longer be part of a stop string.

    The match that *ends* first wins; of those that end together the longest one does. The result does not
    depend on how the text is split.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._places = [_Place(text) for text in dict.fromkeys(stop)]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Takes more text; returns what became final. After a match (`matched`) nothing more comes out."""
        if not self._places:
            return text
        if self.matched is not None:
            return ""
        ends = [
            (end, -len(place.stop), place.stop) for place in self._places if (end := place.advance(text)) is not None
        ]
        buffer = self._held + text
        if ends:
            end, _, self.matched = min(ends)
            start = len(self._held) + end - len(self.matched)
            self._held = ""
            return buffer[:start]
        num_final = len(buffer) - max(place.num_matched for place in self._places)
        self._held = buffer[num_final:]
        return buffer[:num_final]

    def flush(self) -> str:
        """No more text will come: what was held back is final after all."""
        held, self._held = self._held, ""
        return held


class _Place:
    """How much of one stop string the end of the text is.

    Attributes:
        num_matched: characters of it, the longest beginning that the text ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # By length - 1 of a beginning: the longest shorter one that it ends with. Grows when first needed.
        self._shorter = [0]

    def advance(self, text: str) -> int | None:
        """Takes more text; where in it the string ends first, None if it does not."""
        at = 0
        while at < len(text):
            if self.num_matched == 0:
                at = text.find(self.stop[0], at)
                if at < 0:
                    return None
                self.num_matched = 1
            else:
                self._take(text[at])
            at += 1
            if self.num_matched == len(self.stop):
                return at
        return None

    def _take(self, char: str) -> None:
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._shorter_than(self.num_matched)
        self.num_matched += self.stop[self.num_matched] == char

    def _shorter_than(self, length: int) -> int:
        while len(self._shorter) < length:
            char, known = self.stop[len(self._shorter)], self._shorter[-1]
            while known and self.stop[known] != char:
                known = self._shorter[known - 1]
            self._shorter.append(known + (self.stop[known] == char))
        return self._shorter[length - 1]
