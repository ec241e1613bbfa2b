"""What can go wrong in the world, split by what the caller can do about it.

Bugs of ours are assertions, not these. `graftline.proto.status` maps each class to one gRPC code.
"""


class GraftlineError(Exception):
    """Base of every error that may cross a process border."""


class InvalidRequestError(GraftlineError):
    """The caller asked for something that can never work.

    Args:
        field: name of the offending field as the caller knows it.
        problem: what is wrong, the offending value included.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for output."""


class OutOfCapacityError(GraftlineError):
    """A queue or a pool is full; the same request may work later."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PeerUnavailableError(GraftlineError):
    """A peer cannot be reached, died, or is about to stop; another one may serve the request."""


class PreemptedError(GraftlineError):
    """The decode took the request's pages back; prefill prompt and emitted tokens again to go on."""


class UnauthenticatedError(GraftlineError):
    """The caller showed no bearer token that this server accepts."""


class TransferFailedError(GraftlineError):
    """A write to a peer's memory was not acknowledged.

    Attributes:
        drained: late bytes are impossible.
        refused: the peer answers, but nothing of the write was taken: this way to it does not work, another one may.
    """

    def __init__(self, message: str, *, drained: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.drained = drained
        self.refused = refused


class IncompatibleError(GraftlineError):
    """Two workers must not be paired; the message names every field that differs."""

    def __init__(self, fields: tuple[str, ...], detail: str) -> None:
        super().__init__(detail)
        self.fields = fields


class CancelledRequestError(GraftlineError):
    """The caller went away or its deadline passed."""


class InternalError(GraftlineError):
    """A fault of this process that ended one request."""
