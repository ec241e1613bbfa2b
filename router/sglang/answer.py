"""What a request generates, as messages of SGLang's scheduler protocol: chunks while it streams, then the whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_proto import sglang_scheduler_pb2 as pb2

from graftline.proto.v1.common_pb2 import FinishReason, TokenLogprob
from graftline.proto.v1.router_pb2 import GenerateFinish
from graftline.router.transcript import Delta

_REASONS = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class SglangAnswer:
    """The answer to one request.

    Args:
        request_id: the gateway's, which every message repeats.
        is_stream: whether chunks are wanted before the whole.
    """

    def __init__(self, request_id: str, num_prompt_tokens: int, *, is_stream: bool) -> None:
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._is_stream = is_stream
        self._choices: dict[int, _Choice] = {}

    def messages(self, delta: Delta) -> list[Any]:
        """What there is to say about a delta."""
        choice = self._choices.setdefault(delta.choice, _Choice())
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        said = []
        if self._is_stream and delta.token_ids:
            said.append(self._chunk(delta, choice))
        if delta.finish is not None:
            said.append(self._whole(delta.choice, choice, delta.finish))
        return said

    def aborted(self) -> list[Any]:
        """The whole of every choice that had begun, cut short."""
        whole = [
            pb2.GenerateComplete(
                output_ids=choice.token_ids,
                finish_reason="abort",
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=len(choice.token_ids),
                index=index,
            )
            for index, choice in (self._choices or {0: _Choice()}).items()
        ]
        return [pb2.GenerateResponse(request_id=self._request_id, complete=complete) for complete in whole]

    def _chunk(self, delta: Delta, choice: _Choice) -> Any:
        chunk = pb2.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(choice.token_ids),
            output_logprobs=_logprobs(delta.token_ids, delta.logprobs),
            index=delta.choice,
        )
        return pb2.GenerateResponse(request_id=self._request_id, chunk=chunk)

    def _whole(self, index: int, choice: _Choice, finish: GenerateFinish) -> Any:
        complete = pb2.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=_REASONS.get(finish.reason, "stop"),
            prompt_tokens=finish.usage.prompt_tokens,
            completion_tokens=finish.usage.completion_tokens,
            cached_tokens=finish.usage.cached_tokens,
            output_logprobs=_logprobs(choice.token_ids, choice.logprobs),
            index=index,
            spec_accepted_tokens=finish.speculation.accepted,
            spec_draft_tokens=finish.speculation.drafted,
        )
        if finish.stop_string:
            complete.matched_stop_str = finish.stop_string
        elif finish.HasField("stop_token_id"):
            complete.matched_token_id = finish.stop_token_id
        return pb2.GenerateResponse(request_id=self._request_id, complete=complete)


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Any:
    """None when none were asked for."""
    if not logprobs:
        return None
    return pb2.OutputLogProbs(
        token_logprobs=[logprob.logprob for logprob in logprobs],
        token_ids=token_ids,
        top_logprobs=[
            pb2.TopLogProbs(
                values=[best.logprob for best in logprob.top], token_ids=[best.token_id for best in logprob.top]
            )
            for logprob in logprobs
        ],
    )
