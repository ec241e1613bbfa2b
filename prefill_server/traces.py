"""What a prefill tells about a handoff in its spans: its queue, its computing and its transfer."""

from graftline.engine.request import Request
from graftline.engine.service_api import FirstToken, PrefillFailed, PrefillFinished, Scheduled
from graftline.prefill_server import handoff
from graftline.tracing import NO_SPAN, Span


class HandoffTrace:
    """Spans of one handoff. Computing ends with the first token; the transfer runs from the moment the destination is
    known to the last acknowledged write, most of it while prompt or tree are computed.

    Args:
        span: of the handoff; ended here.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self._queue = self._compute = self._transfer = NO_SPAN

    def started(self, request: Request) -> None:
        """The request is known."""
        if not self._span.is_recording:
            return
        self._span.set(
            {
                "graftline.request_id": request.key.request_id,
                "graftline.prefill.attempt": request.key.attempt,
                "graftline.tokens": len(request.token_ids),
            }
        )
        self._queue = self._span.child("graftline.queue")

    def saw(self, message: handoff.Message) -> None:
        """Something happened to the handoff."""
        if not self._span.is_recording:
            return
        match message:
            case Scheduled(cached_tokens):
                self._queue.end()
                self._compute = self._span.child("graftline.compute", {"graftline.cached_tokens": cached_tokens})
            case handoff.SetDestination():
                self._transfer = self._span.child("graftline.transfer")
            case FirstToken():
                self._compute.end()
            case PrefillFinished(_, _, counts):
                self._transfer.set(
                    {
                        "graftline.kv.bytes": counts.num_bytes,
                        "graftline.kv.write_s": counts.write_s,
                        "graftline.chunks": counts.chunks,
                    }
                )
                self._transfer.end()
            case PrefillFailed(_, reason) | handoff.Refused(_, reason):
                self._span.fail(reason)

    def ended(self, outcome: str) -> None:
        """Nothing of the handoff is held any more."""
        for span in (self._queue, self._compute, self._transfer):
            span.end()
        self._span.set({"graftline.outcome": outcome})
        self._span.end()
