"""What a decode tells about a request in its spans."""

from graftline.decode_server import handoff
from graftline.engine.request import Request, RequestKey
from graftline.engine.service_api import (
    DecodeCancelled,
    DecodeFailed,
    DecodeFinished,
    Drained,
    FirstToken,
    Preempted,
    PrefillFailed,
    PrefillFinished,
    Reserved,
    Scheduled,
    SpeculationCounts,
    Tokens,
)
from graftline.proto.channel import Metadata
from graftline.tracing import NO_SPAN, Span, SpanKind, Value, now_ns

# A long answer has hundreds of rounds, all alike; later ones are counted in the span of them all.
MAX_ROUND_SPANS = 64


def call_attributes(request: Request) -> dict[str, Value]:
    """What the router asked for."""
    return {
        "graftline.request_id": request.key.request_id,
        "graftline.attempt": request.key.attempt,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "graftline.earlier_tokens": request.num_earlier_tokens,
    }


class AttemptTrace:
    """Two spans of one attempt: the handoff, from the call of the prefill to its last word; then the rounds, each of
    which is a span from the outcome of the one before to its own.
    """

    def __init__(self, span: Span, key: RequestKey, prefill_address: str) -> None:
        self._span = span
        self._rounds = NO_SPAN
        self._handoff = NO_SPAN
        self._num_rounds = 0
        self._last_ns = 0
        if span.is_recording:
            attributes: dict[str, Value] = {
                "graftline.prefill.address": prefill_address,
                "graftline.prefill.attempt": key.attempt,
            }
            self._handoff = span.child("graftline.handoff", attributes, kind=SpanKind.CLIENT)

    @property
    def metadata(self) -> Metadata:
        """What makes the prefill's spans children of the handoff."""
        return (self._handoff if self._span.is_recording else self._span).metadata

    def saw(self, message: handoff.Message) -> None:
        """Something happened to the attempt."""
        if not self._span.is_recording:
            return
        match message:
            case Scheduled(cached_tokens):
                self._handoff.event("scheduled", {"graftline.cached_tokens": cached_tokens})
            case Reserved(destination):
                self._handoff.event("reserved", {"graftline.pages": len(destination.page_ids)})
            case FirstToken() | handoff.FirstTokenEnds():
                self._handoff.event("first token")
            case PrefillFinished(tree, origin, counts):
                self._handoff.set(
                    {
                        "graftline.tree.nodes": tree.num_nodes,
                        "graftline.tree.origin": origin.value,
                        "graftline.kv.bytes": counts.num_bytes,
                    }
                )
                self._handoff.end()
                self._last_ns = now_ns()
            case PrefillFailed(code, reason):
                self._handoff.set({"error.type": code.value})
                self._lose(reason)
            case handoff.StreamLost(reason):
                self._lose(reason)
            case Drained():
                self._handoff.end()
            case Tokens(ids):
                self._round(len(ids))
            case DecodeFinished(speculation=counts) | Preempted(counts):
                self._end_rounds(counts)
            case DecodeFailed(reason):
                self._rounds.fail(reason)
                self._rounds.end()
            case DecodeCancelled():
                self._rounds.set({"graftline.cancelled": True})
                self._rounds.end()

    def ended(self) -> None:
        """Nothing of the attempt is held any more."""
        self._handoff.end()
        self._rounds.end()

    def _lose(self, reason: str) -> None:
        self._handoff.fail(reason)
        self._handoff.end()

    def _round(self, num_tokens: int) -> None:
        if self._num_rounds == 0:
            self._rounds = self._span.child("graftline.rounds", start_ns=self._last_ns)
        self._num_rounds += 1
        begun_ns, self._last_ns = self._last_ns, now_ns()
        if self._num_rounds > MAX_ROUND_SPANS:
            return
        attributes: dict[str, Value] = {"graftline.round": self._num_rounds, "graftline.tokens": num_tokens}
        self._rounds.child("graftline.round", attributes, start_ns=begun_ns).end(self._last_ns)

    def _end_rounds(self, counts: SpeculationCounts) -> None:
        self._rounds.set(
            {
                "graftline.rounds": self._num_rounds,
                "graftline.drafted": counts.drafted,
                "graftline.accepted": counts.accepted,
            }
        )
        self._rounds.end()
