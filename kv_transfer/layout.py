"""Where the logical buffers of a worker lie, by name.

Nothing here knows tensors or models: a buffer is an address, a unit size and a stride. Two workers are matched by
`BufferKey` alone, never by position in a list.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum

from graftline.errors import InvalidRequestError
from graftline.kv_transfer.protocol_choice import Endpoint, TransferPath
from graftline.proto.v1 import common_pb2

_ADDRESS_LIMIT = 1 << 64


class UnitKind(Enum):
    """What one id of a buffer stands for."""

    PAGE = "page"
    SLOT = "slot"


class BufferKind(StrEnum):
    """The kinds of buffers that travel from prefill to decode."""

    K = "k"
    V = "v"
    LATENT = "latent"
    CONV = "conv"
    SSM = "ssm"
    DRAFT_K = "draft_k"
    DRAFT_V = "draft_v"

    @property
    def unit(self) -> UnitKind:
        """Recurrent state lives in request slots, everything else in pages of token positions."""
        return UnitKind.SLOT if self in (BufferKind.CONV, BufferKind.SSM) else UnitKind.PAGE


PAGE_KINDS = frozenset(kind for kind in BufferKind if kind.unit is UnitKind.PAGE)
SLOT_KINDS = frozenset(kind for kind in BufferKind if kind.unit is UnitKind.SLOT)


@dataclass(frozen=True, slots=True, order=True)
class BufferKey:
    """Names one logical buffer of a model.

    Args:
        kind: what the buffer holds.
        layer: global layer id; for the drafter its own layer index.
    """

    kind: BufferKind
    layer: int

    def __str__(self) -> str:
        return f"{self.kind.value}[{self.layer}]"


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One logical buffer: unit `i` covers `unit_bytes` bytes at `base_address + i * unit_stride_bytes`.

    Raises:
        InvalidRequestError: a value that no real buffer can have; the message names the buffer and the field.
    """

    key: BufferKey
    dtype: str
    base_address: int
    unit_bytes: int
    unit_stride_bytes: int
    num_units: int

    def __post_init__(self) -> None:
        self._require(self.key.layer >= 0, "layer", self.key.layer)
        self._require(bool(self.dtype), "dtype", repr(self.dtype))
        self._require(self.base_address > 0, "base_address", self.base_address)
        self._require(self.unit_bytes > 0, "unit_bytes", self.unit_bytes)
        self._require(self.unit_stride_bytes >= self.unit_bytes, "unit_stride_bytes", self.unit_stride_bytes)
        self._require(self.num_units > 0, "num_units", self.num_units)
        self._require(self.end_address <= _ADDRESS_LIMIT, "end address", self.end_address)

    def _require(self, holds: bool, field: str, value: object) -> None:
        if not holds:
            raise InvalidRequestError(f"buffer {self.key} {field}", f"{value} is impossible")

    @property
    def end_address(self) -> int:
        """One past the last byte of the last unit."""
        return self.base_address + (self.num_units - 1) * self.unit_stride_bytes + self.unit_bytes

    def unit_address(self, unit_id: int) -> int:
        """Address of the first byte of unit `unit_id`."""
        assert 0 <= unit_id < self.num_units, f"unit {unit_id} of {self.key} is outside [0, {self.num_units})"
        return self.base_address + unit_id * self.unit_stride_bytes

    def to_proto(self) -> common_pb2.BufferLayout:
        """The wire form."""
        return common_pb2.BufferLayout(
            kind=self.key.kind.value,
            layer=self.key.layer,
            dtype=self.dtype,
            base_address=self.base_address,
            unit_bytes=self.unit_bytes,
            unit_stride_bytes=self.unit_stride_bytes,
            num_units=self.num_units,
        )

    @classmethod
    def from_proto(cls, message: common_pb2.BufferLayout) -> "BufferLayout":
        """Reads a peer's buffer.

        Raises:
            InvalidRequestError: an unknown kind or an impossible value.
        """
        try:
            kind = BufferKind(message.kind)
        except ValueError as error:
            raise InvalidRequestError("buffer kind", f"{message.kind!r} is unknown") from error
        return cls(
            key=BufferKey(kind, message.layer),
            dtype=message.dtype,
            base_address=message.base_address,
            unit_bytes=message.unit_bytes,
            unit_stride_bytes=message.unit_stride_bytes,
            num_units=message.num_units,
        )


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The buffers of one stage and the transfer session under which they can be written.

    Args:
        session_id: the one that writes go to.
        host_id: equal for processes that can open each other's GPU memory; empty: unknown.
        endpoints: all ways into the stage, before one of them was chosen; empty: there is only the session.

    Raises:
        InvalidRequestError: no session, no buffers, a repeated key, or two buffers that share bytes.
    """

    stage: int
    session_id: str
    buffers: tuple[BufferLayout, ...]
    host_id: str = ""
    endpoints: tuple[Endpoint, ...] = ()

    def __post_init__(self) -> None:
        if self.stage < 0:
            raise InvalidRequestError("stage", f"{self.stage} is negative")
        if not self.session_id:
            raise InvalidRequestError(f"stage {self.stage} session_id", "is empty")
        if not self.buffers:
            raise InvalidRequestError(f"stage {self.stage} buffers", "are empty")
        repeated = _repeated(buffer.key for buffer in self.buffers)
        if repeated:
            raise InvalidRequestError(f"stage {self.stage} buffers", f"repeat {_names(repeated)}")
        _require_disjoint(self.buffers)

    def to_proto(self) -> common_pb2.StageLayout:
        """The wire form."""
        return common_pb2.StageLayout(
            stage=self.stage,
            session_id=self.session_id,
            buffers=[buffer.to_proto() for buffer in self.buffers],
            host_id=self.host_id,
            endpoints=[
                common_pb2.TransferEndpoint(path=endpoint.path.value, session_id=endpoint.session_id)
                for endpoint in self.endpoints
            ],
        )

    @classmethod
    def from_proto(cls, message: common_pb2.StageLayout) -> "StageLayout":
        """Reads a peer's stage.

        Raises:
            InvalidRequestError: see `StageLayout` and `BufferLayout`.
        """
        buffers = tuple(BufferLayout.from_proto(buffer) for buffer in message.buffers)
        known = {path.value for path in TransferPath}
        endpoints = tuple(
            Endpoint(TransferPath(endpoint.path), endpoint.session_id)
            for endpoint in message.endpoints
            if endpoint.path in known  # a newer peer may have ways that are unknown here
        )
        return cls(message.stage, message.session_id, buffers, message.host_id, endpoints)


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """All stages of one worker, in order; every key lies on exactly one stage.

    Raises:
        InvalidRequestError: stage numbers that are not 0, 1, 2, ..., or a key on two stages.
    """

    stages: tuple[StageLayout, ...]

    def __post_init__(self) -> None:
        numbers = [stage.stage for stage in self.stages]
        if not numbers or numbers != list(range(len(numbers))):
            raise InvalidRequestError("stages", f"are numbered {numbers}, not 0, 1, 2, ...")
        repeated = _repeated(buffer.key for _, buffer in self.buffers())
        if repeated:
            raise InvalidRequestError("stages", f"hold {_names(repeated)} more than once")

    @classmethod
    def from_stages(cls, stages: Iterable[StageLayout]) -> "WorkerLayout":
        """Builds the layout from stages in any order."""
        return cls(tuple(sorted(stages, key=lambda stage: stage.stage)))

    @classmethod
    def from_proto(cls, stages: Iterable[common_pb2.StageLayout]) -> "WorkerLayout":
        """Reads a peer's stages, in any order."""
        return cls.from_stages(StageLayout.from_proto(stage) for stage in stages)

    def buffers(self) -> Iterator[tuple[StageLayout, BufferLayout]]:
        """Every buffer with the stage it lies on."""
        for stage in self.stages:
            for buffer in stage.buffers:
                yield stage, buffer

    def by_key(self) -> dict[BufferKey, tuple[StageLayout, BufferLayout]]:
        """Every buffer with its stage, by key."""
        return {buffer.key: (stage, buffer) for stage, buffer in self.buffers()}

    @property
    def keys(self) -> frozenset[BufferKey]:
        """The keys this worker holds."""
        return frozenset(buffer.key for _, buffer in self.buffers())

    @property
    def session_ids(self) -> tuple[str, ...]:
        """The sessions of this worker, each once, in stage order."""
        return tuple(dict.fromkeys(stage.session_id for stage in self.stages))

    def missing(self, wanted: Collection[BufferKey]) -> tuple[BufferKey, ...]:
        """The wanted keys that no stage holds, sorted."""
        return tuple(sorted(set(wanted) - self.keys))


def _repeated(keys: Iterable[BufferKey]) -> list[BufferKey]:
    seen: set[BufferKey] = set()
    repeated: list[BufferKey] = []
    for key in keys:
        (repeated.append if key in seen else seen.add)(key)
    return repeated


def _names(keys: Iterable[BufferKey]) -> str:
    return ", ".join(str(key) for key in keys)


def _require_disjoint(buffers: tuple[BufferLayout, ...]) -> None:
    """Buffers whose address ranges interleave must be entries of one pool: one stride, disjoint inside a unit."""
    pool: list[BufferLayout] = []
    for buffer in sorted(buffers, key=lambda buffer: buffer.base_address):
        if pool and buffer.base_address < max(entry.end_address for entry in pool):
            first, previous = pool[0], pool[-1]
            fits = (
                buffer.unit_stride_bytes == first.unit_stride_bytes
                and buffer.base_address >= previous.base_address + previous.unit_bytes
                and buffer.base_address + buffer.unit_bytes <= first.base_address + first.unit_stride_bytes
            )
            if not fits:
                raise InvalidRequestError("buffers", f"{previous.key} and {buffer.key} share bytes")
            pool.append(buffer)
        else:
            pool = [buffer]
