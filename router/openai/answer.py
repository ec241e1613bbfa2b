"""What is generated, in the shapes of /v1/chat/completions and /v1/completions, whole or as chunks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graftline.proto.v1.common_pb2 import FinishReason, TokenLogprob
from graftline.proto.v1.router_pb2 import GenerateFinish
from graftline.router.openai.request import OpenAiRequest
from graftline.router.text.detokenizer import Detokenizer, Vocabulary
from graftline.router.transcript import Delta

_REASONS: Mapping[int, str] = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class _Choice:
    """What a choice has received so far."""

    detokenizer: Detokenizer  # says where in the text each token begins
    offset: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: GenerateFinish | None = None


class Answer:
    """Builds the JSON of one answer. `add` every delta; then `chunks` (streaming) or, at the end, `whole`.

    Args:
        prompt_tokens: of all prompts together.
    """

    def __init__(
        self, request: OpenAiRequest, request_id: str, model_id: str, vocabulary: Vocabulary, prompt_tokens: int
    ) -> None:
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._vocabulary = vocabulary
        keeps, goes_on = request.requests[0].keep_special_tokens, not request.is_chat
        self._choices = [
            _Choice(vocabulary.detokenizer(keep_special_tokens=keeps, goes_on=goes_on))
            for _ in range(request.num_choices)
        ]
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": request.model or model_id,
        }

    def add(self, delta: Delta) -> None:
        """Takes a delta."""
        choice = self._choices[delta.choice]
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        choice.finish = delta.finish or choice.finish

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat choice: its role."""
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """A delta that was added just now, as chunks: the one that ends a choice of a chat carries nothing else."""
        choice: dict[str, Any] = {"index": delta.choice}
        if self._request.is_chat:
            choice["delta"] = {"content": delta.text} if delta.text or delta.token_ids else {}
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs(self._choices[delta.choice], delta.token_ids, delta.logprobs)
        choice["finish_reason"] = _reason(delta.finish)
        if not self._request.is_chat or delta.finish is None or not choice["delta"]:
            return [self._chunk(choice)]
        ending = {"index": delta.choice, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        return [self._chunk({**choice, "finish_reason": None}), self._chunk(ending)]

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk without choices that ends a stream with include_usage."""
        return {**self._chunk(None), "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        shaped: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self._request.is_chat
            else {"text": text}
        )
        return {
            "index": index,
            **shaped,
            "logprobs": self._logprobs(choice, choice.token_ids, choice.logprobs),
            "finish_reason": _reason(choice.finish),
        }

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._request.is_chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": [] if choice is None else [choice]}
        if self._request.include_usage:
            chunk["usage"] = self._usage() if self._request.continuous_usage else None
        return chunk

    def _usage(self) -> dict[str, Any]:
        """Prompts count once, whatever n is."""
        finishes = [choice.finish for choice in self._choices if choice.finish is not None]
        num_choices = len(self._choices) // len(self._request.requests)
        firsts = [choice.finish.usage for choice in self._choices[::num_choices] if choice.finish is not None]
        completion_tokens = sum(len(choice.token_ids) for choice in self._choices)
        accepted = sum(finish.speculation.accepted for finish in finishes)
        drafted = sum(finish.speculation.drafted for finish in finishes)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": max(0, drafted - accepted),
            },
        }

    def _logprobs(
        self, choice: _Choice, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any] | None:
        """Of the next tokens of a choice."""
        if not self._request.requests[0].HasField("logprobs"):
            return None
        pairs = list(zip(token_ids, logprobs, strict=False))
        if self._request.is_chat:
            return {"content": [self._chat_logprob(token_id, entry) for token_id, entry in pairs], "refusal": None}
        offsets = []
        for token_id, _ in pairs:
            offsets.append(choice.offset)
            choice.offset += len(choice.detokenizer.feed(token_id))
        return {
            "tokens": [self._vocabulary.token_text(token_id) for token_id, _ in pairs],
            "token_logprobs": [entry.logprob for _, entry in pairs],
            "top_logprobs": [self._most_likely(token_id, entry) for token_id, entry in pairs],
            "text_offset": offsets,
        }

    def _most_likely(self, token_id: int, entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the emitted one, by text; of several with one text the most likely."""
        found: dict[str, float] = {}
        for top in entry.top:
            found.setdefault(self._vocabulary.token_text(top.token_id), top.logprob)
        found.setdefault(self._vocabulary.token_text(token_id), entry.logprob)
        return found

    def _chat_logprob(self, token_id: int, entry: TokenLogprob) -> dict[str, Any]:
        return {
            **self._named(token_id, entry.logprob),
            "top_logprobs": [self._named(top.token_id, top.logprob) for top in entry.top],
        }

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._vocabulary.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._vocabulary.token_bytes(token_id)),
        }


def _reason(finish: GenerateFinish | None) -> str | None:
    return None if finish is None else _REASONS.get(finish.reason, "stop")
