"""The output of one choice so far: ids, text, and whether it has ended. It outlives attempts, so that a stream
continued on another pair neither repeats nor loses anything.
"""

from dataclasses import dataclass

from graftline.proto.v1.common_pb2 import FinishReason, TokenLogprob
from graftline.proto.v1.decode_pb2 import DecodeTokens
from graftline.proto.v1.router_pb2 import GenerateFinish
from graftline.router.parameters import Plan
from graftline.router.text.stop_strings import StopMatcher


@dataclass(slots=True)
class Delta:
    """What became final for a choice; `finish` is set on the last one."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish: GenerateFinish | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a choice ended."""

    reason: "FinishReason.ValueType"
    stop_string: str = ""
    stop_token_id: int | None = None


class Transcript:
    """Takes tokens one by one, since a stop string or token may lie in the middle of a round."""

    def __init__(self, plan: Plan, choice: int) -> None:
        self.token_ids: list[int] = []
        self.ending: Ending | None = None
        self._choice = choice
        self._ending_ids = plan.ending_ids
        self._max_tokens = plan.max_tokens
        self._min_tokens = plan.parameters.min_tokens
        self._keeps_special_tokens = plan.parameters.keep_special_tokens
        self._detokenizer = plan.model.vocabulary.detokenizer(
            keep_special_tokens=self._keeps_special_tokens, goes_on=plan.goes_on
        )
        self._matcher = StopMatcher(plan.parameters.stop)

    def take(self, tokens: DecodeTokens) -> Delta:
        """Tokens of one round. Whatever comes after the end of the choice is dropped."""
        num_before = len(self.token_ids)
        text = [self._take_token(token_id) for token_id in tokens.token_ids if self.ending is None]
        num_taken = len(self.token_ids) - num_before
        return Delta(self._choice, "".join(text), self.token_ids[num_before:], list(tokens.logprobs[:num_taken]))

    def end(self, ending: Ending) -> str:
        """The choice ends for a reason that its tokens do not show. Returns the text held back."""
        if self.ending is not None:
            return ""
        self.ending = ending
        return self._flush()

    def _take_token(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        if token_id in self._ending_ids:
            self.ending = Ending(FinishReason.FINISH_REASON_STOP, stop_token_id=token_id)
            text = self._fed(token_id) if self._keeps_special_tokens else ""
            return text + self._flush()
        text = self._fed(token_id)
        if self._matcher.matched is not None:
            self.ending = Ending(FinishReason.FINISH_REASON_STOP, stop_string=self._matcher.matched)
        elif len(self.token_ids) >= self._max_tokens:
            self.ending = Ending(FinishReason.FINISH_REASON_LENGTH)
            text += self._flush()
        return text

    def _fed(self, token_id: int) -> str:
        text = self._detokenizer.feed(token_id)
        if len(self.token_ids) <= self._min_tokens:
            return text
        return self._matcher.feed(text)

    def _flush(self) -> str:
        text = self._matcher.feed(self._detokenizer.flush())
        return text + self._matcher.flush()
