"""What a router tells about a request in its spans. Attribute names follow OpenTelemetry's where it has one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from graftline.errors import GraftlineError
from graftline.proto.channel import Metadata
from graftline.proto.status import Leg
from graftline.proto.v1.common_pb2 import FinishReason
from graftline.proto.v1.router_pb2 import GenerateFinish
from graftline.router.pairing import Pair
from graftline.router.parameters import Plan
from graftline.tracing import NO_SPAN, Span, SpanKind, Value


def request_attributes(plans: Sequence[Plan]) -> dict[str, Value]:
    """What was asked for."""
    return {
        "gen_ai.request.model": plans[0].model.model_id,
        "gen_ai.request.choice.count": sum(plan.parameters.num_choices for plan in plans),
        "gen_ai.request.max_tokens": plans[0].max_tokens,
        "gen_ai.usage.input_tokens": sum(len(plan.prompt_ids) for plan in plans),
    }


class ChoiceTrace:
    """The spans of one choice's attempts, children of the request's."""

    def __init__(self, span: Span, choice: int) -> None:
        self._request = span
        self._choice = choice
        self._attempt = NO_SPAN
        self._has_tokens = False

    @property
    def metadata(self) -> Metadata:
        """What makes the decode's spans children of the attempt under way."""
        return self._attempt.metadata

    def attempt(self, pair: Pair, number: int) -> AbstractContextManager[object]:
        """An attempt is under way while the block is open."""
        if not self._request.is_recording:
            # Not sampled, or off: the decode is told so and asks nobody itself.
            self._attempt = self._request
            return NO_SPAN
        attributes: dict[str, Value] = {
            "graftline.choice": self._choice,
            "graftline.attempt": number,
            "graftline.prefill.address": pair.prefill.address,
            "graftline.decode.address": pair.decode.address,
        }
        self._attempt = self._request.child("graftline.attempt", attributes, kind=SpanKind.CLIENT)
        return self._attempt

    def tokens_came(self, num_tokens: int) -> None:
        """Tokens went on to the client; the first ones make an event."""
        if not self._has_tokens:
            self._has_tokens = True
            self._attempt.event("first token", {"graftline.tokens": num_tokens})

    def failed(self, leg: Leg, error: GraftlineError) -> None:
        """The attempt under way failed."""
        self._attempt.set({"graftline.leg": leg.value, "error.type": type(error).__name__})
        self._attempt.fail(str(error))

    def finished(self, finish: GenerateFinish) -> None:
        """The choice ended well in the attempt under way."""
        if not self._attempt.is_recording:
            return
        stats = finish.speculation
        attributes: dict[str, Value] = {
            "gen_ai.usage.output_tokens": finish.usage.completion_tokens,
            "graftline.cached_tokens": finish.usage.cached_tokens,
            "graftline.finish_reason": FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower(),
        }
        if stats.rounds:
            attributes["graftline.rounds"] = stats.rounds
            attributes["graftline.accept_length"] = (stats.accepted + stats.rounds) / stats.rounds
        self._attempt.set(attributes)
