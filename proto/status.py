"""The one table between `graftline.errors` and gRPC status codes, both ways.

Every status carries `google.rpc` details: an `ErrorInfo` whose `reason` names the class exactly and whose
metadata may name the leg that failed, a `BadRequest` for a bad field, a `RetryInfo` for a wait.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from graftline.errors import (
    CancelledRequestError,
    GraftlineError,
    IncompatibleError,
    InternalError,
    InvalidRequestError,
    OutOfCapacityError,
    PeerUnavailableError,
    PreemptedError,
    TransferFailedError,
    UnauthenticatedError,
)
from graftline.proto.v1.common_pb2 import SpeculationStats

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

ERROR_DOMAIN = "graftline"
# gRPC metadata is bounded (8 KiB by default); a message travels in it twice.
MAX_MESSAGE_CHARS = 1000


class Leg(Enum):
    """Which of a request's two workers an error is about."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Failure:
    """What a failed call said.

    Attributes:
        error: the typed error.
        code: the gRPC code it came with.
        leg: the leg that failed, when the server named one.
        speculation: what the failed attempt had done so far, when the server told.
    """

    error: GraftlineError
    code: grpc.StatusCode
    leg: Leg | None = None
    speculation: SpeculationStats | None = None


@dataclass(frozen=True, slots=True)
class _Mapping:
    code: grpc.StatusCode
    rebuild: Callable[[str, "_Details"], GraftlineError]


@dataclass(frozen=True, slots=True)
class _Details:
    metadata: dict[str, str]
    violation: tuple[str, str] | None = None
    retry_after_s: float | None = None


def _invalid_request(message: str, details: _Details) -> GraftlineError:
    field, problem = details.violation or ("request", message)
    return InvalidRequestError(field, problem)


def _out_of_capacity(message: str, details: _Details) -> GraftlineError:
    return OutOfCapacityError(message, retry_after_s=details.retry_after_s)


def _transfer_failed(message: str, details: _Details) -> GraftlineError:
    return TransferFailedError(message, drained=details.metadata.get("drained") == "true")


def _incompatible(message: str, details: _Details) -> GraftlineError:
    fields = details.metadata.get("fields", "")
    return IncompatibleError(tuple(filter(None, fields.split(","))), message)


TABLE: dict[type[GraftlineError], _Mapping] = {
    InvalidRequestError: _Mapping(grpc.StatusCode.INVALID_ARGUMENT, _invalid_request),
    OutOfCapacityError: _Mapping(grpc.StatusCode.RESOURCE_EXHAUSTED, _out_of_capacity),
    PeerUnavailableError: _Mapping(grpc.StatusCode.UNAVAILABLE, lambda message, _: PeerUnavailableError(message)),
    PreemptedError: _Mapping(grpc.StatusCode.ABORTED, lambda message, _: PreemptedError(message)),
    UnauthenticatedError: _Mapping(grpc.StatusCode.UNAUTHENTICATED, lambda message, _: UnauthenticatedError(message)),
    TransferFailedError: _Mapping(grpc.StatusCode.ABORTED, _transfer_failed),
    IncompatibleError: _Mapping(grpc.StatusCode.FAILED_PRECONDITION, _incompatible),
    CancelledRequestError: _Mapping(grpc.StatusCode.CANCELLED, lambda message, _: CancelledRequestError(message)),
    InternalError: _Mapping(grpc.StatusCode.INTERNAL, lambda message, _: InternalError(message)),
}
_BY_REASON = {error_class.__name__: mapping for error_class, mapping in TABLE.items()}
_CODES = {code.value[0]: code for code in grpc.StatusCode}
# What a status without our details means: it came from gRPC itself.
_BY_CODE: dict[grpc.StatusCode, Callable[[str, _Details], GraftlineError]] = {
    **{mapping.code: mapping.rebuild for mapping in TABLE.values()},
    grpc.StatusCode.ABORTED: TABLE[PreemptedError].rebuild,
    grpc.StatusCode.DEADLINE_EXCEEDED: TABLE[CancelledRequestError].rebuild,
}


def status_of(
    error: GraftlineError, *, leg: Leg | None = None, speculation: SpeculationStats | None = None
) -> status_pb2.Status:
    """The status that tells a peer about `error`."""
    mapping = _mapping_of(error)
    message = _shortened(str(error)) or type(error).__name__
    metadata = _metadata_of(error)
    if leg is not None:
        metadata["leg"] = leg.value
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=_reason_of(error), domain=ERROR_DOMAIN, metadata=metadata)
    ]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shortened(error.field), description=_shortened(error.problem)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, OutOfCapacityError) and error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_after_s))
        details.append(retry)
    if speculation is not None:
        details.append(speculation)
    return status_pb2.Status(code=mapping.code.value[0], message=message, details=[_packed(item) for item in details])


async def abort_with(
    context: Any,
    error: GraftlineError,
    *,
    leg: Leg | None = None,
    speculation: SpeculationStats | None = None,
) -> NoReturn:
    """Ends the RPC of an aio servicer with the status of `error`; raises grpc's own abort exception.

    Args:
        context: the RPC's `grpc.aio.ServicerContext`.
        leg: the leg that failed, for a caller that keeps score per worker.
        speculation: what a failed decode attempt had done so far.
    """
    status = rpc_status.to_status(status_of(error, leg=leg, speculation=speculation))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


class rpc_border:  # noqa: N801 - reads as the statement it is
    """The border of an RPC handler: a typed error becomes its status, anything else INTERNAL and a log line.

    A class, because every request passes it and a generator's context manager takes several times as long.
    """

    __slots__ = ("_context", "_leg")

    def __init__(self, context: Any, *, leg: Leg | None = None) -> None:
        self._context = context
        self._leg = leg

    async def __aenter__(self) -> None:
        return

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, grpc.RpcError | grpc.aio.AbortError):
            return
        if not isinstance(error, GraftlineError):
            logger.error("an RPC handler failed", exc_info=error)
            error = InternalError(f"{type(error).__name__}: {error}")
        await abort_with(self._context, error, leg=self._leg)


def failure_from_rpc(exc: grpc.RpcError) -> Failure:
    """What a failed call (aio or sync) said: typed error, code, leg and figures of the attempt."""
    code = exc.code() if hasattr(exc, "code") else grpc.StatusCode.UNKNOWN
    message = (exc.details() if hasattr(exc, "details") else None) or code.name
    return _failure(code, message, _status_of_call(exc))


def failure_from_status(packed: bytes) -> Failure | None:
    """The same from a serialized `google.rpc.Status`; None when it says OK."""
    try:
        status = status_pb2.Status.FromString(packed)
    except DecodeError:
        return _failure(grpc.StatusCode.UNKNOWN, "a status that cannot be read", None)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return None if code is grpc.StatusCode.OK else _failure(code, status.message or code.name, status)


def _failure(code: grpc.StatusCode, message: str, status: status_pb2.Status | None) -> Failure:
    info = error_details_pb2.ErrorInfo()
    violation: tuple[str, str] | None = None
    retry_after_s: float | None = None
    speculation: SpeculationStats | None = None
    for packed in status.details if status is not None else ():
        if packed.Unpack(info):
            continue
        if packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            first = _unpacked(packed, error_details_pb2.BadRequest()).field_violations[0]
            violation = (first.field, first.description)
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = _unpacked(packed, error_details_pb2.RetryInfo()).retry_delay
            retry_after_s = delay.ToTimedelta().total_seconds()
        elif packed.Is(SpeculationStats.DESCRIPTOR):
            speculation = _unpacked(packed, SpeculationStats())
    details = _Details(dict(info.metadata), violation, retry_after_s)
    rebuild = _rebuild_of(info, code)
    leg = details.metadata.get("leg")
    return Failure(rebuild(message, details), code, Leg(leg) if leg in {"prefill", "decode"} else None, speculation)


def error_from_rpc(exc: grpc.RpcError) -> GraftlineError:
    """The typed error of a failed call (aio or sync)."""
    return failure_from_rpc(exc).error


def _rebuild_of(info: error_details_pb2.ErrorInfo, code: grpc.StatusCode) -> Callable[[str, _Details], GraftlineError]:
    if info.domain == ERROR_DOMAIN and info.reason in _BY_REASON:
        return _BY_REASON[info.reason].rebuild
    return _BY_CODE.get(code, TABLE[InternalError].rebuild)


def _mapping_of(error: GraftlineError) -> _Mapping:
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), TABLE[InternalError])


def _reason_of(error: GraftlineError) -> str:
    return next((kind.__name__ for kind in type(error).__mro__ if kind in TABLE), InternalError.__name__)


def _metadata_of(error: GraftlineError) -> dict[str, str]:
    if isinstance(error, TransferFailedError):
        return {"drained": "true" if error.drained else "false"}
    if isinstance(error, IncompatibleError):
        return {"fields": ",".join(error.fields)}
    return {}


def _status_of_call(exc: grpc.RpcError) -> status_pb2.Status | None:
    trailing: Any = exc.trailing_metadata() if hasattr(exc, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == "grpc-status-details-bin":
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:  # a peer's garbage must not hide the code
                return None
    return None


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _unpacked(packed: AnyMessage, into: M) -> M:
    packed.Unpack(into)
    return into


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"
