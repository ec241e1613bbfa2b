"""From layouts and unit ids to the fewest copies that move exactly the wanted bytes.

A planner is built once for a source stage and a peer incarnation. It pairs buffers by key, so stage counts and layer
splits may differ between the two sides, and joins what lies side by side on both of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import add
from typing import NamedTuple

from graftline.errors import IncompatibleError, InvalidRequestError
from graftline.kv_transfer.layout import BufferKind, BufferLayout, StageLayout, WorkerLayout

Run = tuple[int, int, int]
"""Units that follow each other on both sides: the first one here, the first one at the peer, how many."""


class Copy(NamedTuple):
    """`num_bytes` bytes from `src_address` here to `dst_address` in the peer's memory."""

    src_address: int
    dst_address: int
    num_bytes: int


def size_of(copies: Sequence[Copy]) -> int:
    """Bytes of some copies in all."""
    return copies[0].num_bytes if len(copies) == 1 else sum([copy.num_bytes for copy in copies])


@dataclass(frozen=True, slots=True)
class _Segment:
    """Bytes that are adjacent inside a unit on both sides; the same for every unit."""

    src_base: int
    dst_base: int
    num_bytes: int
    src_stride: int
    dst_stride: int
    src_units: int
    dst_units: int

    @property
    def spans_units(self) -> bool:
        """Whether the segment fills its unit on both sides, so that neighbouring units join."""
        return self.num_bytes == self.src_stride == self.dst_stride

    def continued_by(self, other: "_Segment") -> bool:
        """Whether `other` starts where this one ends, on both sides of every unit."""
        return (
            self.src_base + self.num_bytes == other.src_base
            and self.dst_base + self.num_bytes == other.dst_base
            and self.src_stride == other.src_stride
            and self.dst_stride == other.dst_stride
        )

    def joined(self, other: "_Segment") -> "_Segment":
        return _Segment(
            self.src_base,
            self.dst_base,
            self.num_bytes + other.num_bytes,
            self.src_stride,
            self.dst_stride,
            min(self.src_units, other.src_units),
            min(self.dst_units, other.dst_units),
        )


class CopyPlanner:
    """Plans the writes of one source stage into one peer.

    Args:
        source: the stage whose memory is read.
        destination: all stages of the peer.

    Raises:
        IncompatibleError: the peer lacks a key of this stage, or holds it with another dtype or unit size.
    """

    def __init__(self, source: StageLayout, destination: WorkerLayout) -> None:
        require_receivable(source, destination)
        self._source = source
        self._destination = destination
        self._plans: dict[frozenset[BufferKind], dict[str, SessionPlan]] = {}

    @property
    def session_ids(self) -> tuple[str, ...]:
        """The peer's sessions that this stage ever writes to, in stage order."""
        targets = self._destination.by_key()
        written = {targets[buffer.key][0].session_id for buffer in self._source.buffers}
        return tuple(session_id for session_id in self._destination.session_ids if session_id in written)

    def plans(self, kinds: frozenset[BufferKind]) -> Mapping[str, "SessionPlan"]:
        """By session, for those that get a part of the buffers of some kinds, in no special order.

        Args:
            kinds: all of them have the same kind of unit (pages, or slots).
        """
        found = self._plans.get(kinds)
        if found is None:
            assert len({kind.unit for kind in kinds}) == 1, f"{sorted(kinds)} mix pages and slots"
            segments = _segments(self._source, self._destination, kinds)
            found = self._plans[kinds] = {session_id: SessionPlan(parts) for session_id, parts in segments.items()}
        return found


class SessionPlan:
    """Plans the writes of some kinds of buffers into one session.

    Args:
        segments: what every unit consists of there; at least one.
    """

    def __init__(self, segments: Sequence[_Segment]) -> None:
        self._segments = segments
        first = segments[0]
        # Of units that are one segment and join: most orders are a single run of these.
        self._whole = (first.src_base, first.dst_base, first.num_bytes, first.src_units, first.dst_units)
        self._is_whole = len(segments) == 1 and first.spans_units

    def copies(self, runs: Sequence[Run]) -> list[Copy]:
        """The copies for some units.

        Args:
            runs: of units; at least one, and no peer id twice.

        Raises:
            InvalidRequestError: an id of the peer that its pool does not have, or one that is repeated.
        """
        if self._is_whole and len(runs) == 1:
            ((src, dst, length),) = runs
            src_base, dst_base, num_bytes, src_units, dst_units = self._whole
            if 0 <= src < src + length <= src_units and 0 <= dst <= dst_units - length:
                return [Copy(src_base + src * num_bytes, dst_base + dst * num_bytes, num_bytes * length)]
        columns = _Columns.of(runs)
        _require_distinct(columns)
        return [copy for segment in self._segments for copy in _copies(segment, columns)]


def require_receivable(source: StageLayout, destination: WorkerLayout) -> None:
    """Passes when the peer has a fitting place for every buffer of a stage.

    Raises:
        IncompatibleError: names every buffer that is absent there or differs in dtype or unit size.
    """
    targets = destination.by_key()
    problems: dict[str, str] = {}
    for buffer in source.buffers:
        name = str(buffer.key)
        if buffer.key not in targets:
            problems[name] = f"{name}: the destination has no such buffer"
            continue
        target = targets[buffer.key][1]
        differing = [
            f"{field} is {ours} here, {theirs} at the destination"
            for field, ours, theirs in (
                ("dtype", buffer.dtype, target.dtype),
                ("unit_bytes", buffer.unit_bytes, target.unit_bytes),
            )
            if ours != theirs
        ]
        if differing:
            problems[name] = f"{name}: {'; '.join(differing)}"
    if problems:
        raise IncompatibleError(tuple(problems), "\n".join(problems.values()))


def require_matched(source: WorkerLayout, destination: WorkerLayout) -> None:
    """Passes when every buffer of either worker has its fitting partner in the other.

    Raises:
        IncompatibleError: see `require_receivable`; also names destination buffers that nobody would fill.
    """
    for stage in source.stages:
        require_receivable(stage, destination)
    unfilled = source.missing(destination.keys)
    if unfilled:
        names = tuple(str(key) for key in unfilled)
        raise IncompatibleError(names, f"the source has no buffer for {', '.join(names)}")


def _segments(
    source: StageLayout, destination: WorkerLayout, kinds: frozenset[BufferKind]
) -> dict[str, tuple[_Segment, ...]]:
    targets = destination.by_key()
    by_session: dict[str, list[_Segment]] = {}
    for buffer in sorted(source.buffers, key=lambda buffer: buffer.base_address):
        if buffer.key.kind in kinds:
            stage, target = targets[buffer.key]
            by_session.setdefault(stage.session_id, []).append(_segment(buffer, target))
    return {session_id: tuple(_joined(segments)) for session_id, segments in by_session.items()}


def _segment(source: BufferLayout, target: BufferLayout) -> _Segment:
    return _Segment(
        source.base_address,
        target.base_address,
        source.unit_bytes,
        source.unit_stride_bytes,
        target.unit_stride_bytes,
        source.num_units,
        target.num_units,
    )


def _joined(segments: Iterable[_Segment]) -> Iterator[_Segment]:
    """Joins neighbours of a run sorted by source address."""
    current: _Segment | None = None
    for segment in segments:
        if current is not None and current.continued_by(segment):
            current = current.joined(segment)
            continue
        if current is not None:
            yield current
        current = segment
    if current is not None:
        yield current


class _Columns(NamedTuple):
    """Runs side by side, for many of them: what is done in C for a column takes a fraction of a look at every run.

    Attributes:
        are_single: every run is one unit.
    """

    srcs: Sequence[int]
    dsts: Sequence[int]
    lengths: Sequence[int]
    are_single: bool

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "_Columns":
        srcs, dsts, lengths = zip(*runs, strict=True)
        assert min(lengths) > 0, "a run without units"
        return cls(srcs, dsts, lengths, max(lengths) == 1)

    @property
    def src_end(self) -> int:
        return max(self.srcs) + 1 if self.are_single else max(map(add, self.srcs, self.lengths))

    @property
    def dst_end(self) -> int:
        return max(self.dsts) + 1 if self.are_single else max(map(add, self.dsts, self.lengths))

    def as_units(self) -> "_Columns":
        """The same units as runs of one each."""
        if self.are_single:
            return self
        runs = zip(self.srcs, self.dsts, self.lengths, strict=True)
        return _Columns.of([(src + step, dst + step, 1) for src, dst, length in runs for step in range(length)])


def _require_distinct(runs: _Columns) -> None:
    if runs.are_single and len(set(runs.dsts)) == len(runs.dsts):
        return
    end: int | None = None
    for dst, length in sorted(zip(runs.dsts, runs.lengths, strict=True)):
        if end is not None and dst < end:
            raise InvalidRequestError("destination units", f"{dst} is repeated")
        end = dst + length


def _copies(segment: _Segment, runs: _Columns) -> list[Copy]:
    """One copy a run when the segment fills its units, else one a unit."""
    src_base, src_stride, num_bytes = segment.src_base, segment.src_stride, segment.num_bytes
    dst_base, dst_stride = segment.dst_base, segment.dst_stride
    _require_range(segment, min(runs.srcs), runs.src_end, min(runs.dsts), runs.dst_end)
    srcs, dsts, lengths, are_single = runs if segment.spans_units else runs.as_units()
    sources = [src_base + src * src_stride for src in srcs]
    targets = [dst_base + dst * dst_stride for dst in dsts]
    sizes = [num_bytes] * len(lengths) if are_single else [num_bytes * length for length in lengths]
    # What Copy(...) does, without a call in Python for each.
    return list(map(tuple.__new__, repeat(Copy), zip(sources, targets, sizes, strict=True)))


def _require_range(segment: _Segment, first_src: int, src_end: int, first_dst: int, dst_end: int) -> None:
    assert 0 <= first_src < src_end <= segment.src_units, (
        f"source units {first_src}..{src_end - 1} are outside [0, {segment.src_units})"
    )
    if not 0 <= first_dst < dst_end <= segment.dst_units:
        problem = f"{first_dst}..{dst_end - 1} are outside [0, {segment.dst_units})"
        raise InvalidRequestError("destination units", problem)
