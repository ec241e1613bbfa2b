"""From layouts and unit ids to the fewest copies that move exactly the wanted bytes.

A planner is built once for a source stage and a peer incarnation. It pairs buffers by key, so stage counts and layer
splits may differ between the two sides, and joins what lies side by side on both of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add, eq
from typing import NamedTuple

from graftline.errors import IncompatibleError, InvalidRequestError
from graftline.kv_transfer.layout import BufferKind, BufferLayout, StageLayout, WorkerLayout


class Copy(NamedTuple):
    """`num_bytes` bytes from `src_address` here to `dst_address` in the peer's memory."""

    src_address: int
    dst_address: int
    num_bytes: int


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
        self._segments: dict[frozenset[BufferKind], dict[str, tuple[_Segment, ...]]] = {}
        self._sessions: dict[frozenset[BufferKind], tuple[str, ...]] = {}

    @property
    def session_ids(self) -> tuple[str, ...]:
        """The peer's sessions that this stage ever writes to, in stage order."""
        targets = self._destination.by_key()
        written = {targets[buffer.key][0].session_id for buffer in self._source.buffers}
        return tuple(session_id for session_id in self._destination.session_ids if session_id in written)

    def sessions(self, kinds: frozenset[BufferKind]) -> tuple[str, ...]:
        """The sessions that get a part of the buffers of some kinds, in no special order.

        Args:
            kinds: all of them have the same kind of unit (pages, or slots).
        """
        found = self._sessions.get(kinds)
        if found is None:
            found = self._sessions[kinds] = tuple(self._segments_of(kinds))
        return found

    def plan(self, session_id: str, kinds: frozenset[BufferKind], units: Sequence[tuple[int, int]]) -> list[Copy]:
        """The copies for some units into one session.

        Args:
            session_id: one of `sessions(kinds)`.
            kinds: which buffers to move.
            units: (id here, id at the peer), in order of position; at least one, and no peer id twice.

        Raises:
            InvalidRequestError: an id of the peer that its pool does not have, or one that is repeated.
        """
        segments = self._segments_of(kinds)[session_id]
        runs = _runs(units)
        if len(runs.dsts) > 1:
            _require_distinct(runs)
        if len(segments) == 1:
            return _copies(segments[0], runs)
        return [copy for segment in segments for copy in _copies(segment, runs)]

    def _segments_of(self, kinds: frozenset[BufferKind]) -> dict[str, tuple[_Segment, ...]]:
        found = self._segments.get(kinds)
        if found is None:
            assert len({kind.unit for kind in kinds}) == 1, f"{sorted(kinds)} mix pages and slots"
            found = self._segments[kinds] = _segments(self._source, self._destination, kinds)
        return found


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


class _Runs(NamedTuple):
    """Units that follow each other on both sides: `lengths[i]` of them from `srcs[i]` here and `dsts[i]` there on."""

    srcs: Sequence[int]
    dsts: Sequence[int]
    lengths: Sequence[int]

    @property
    def as_units(self) -> "_Runs":
        """The same as runs of one unit each."""
        if max(self.lengths) == 1:
            return self
        steps = [range(length) for length in self.lengths]
        srcs = [src + step for src, run in zip(self.srcs, steps, strict=True) for step in run]
        dsts = [dst + step for dst, run in zip(self.dsts, steps, strict=True) for step in run]
        return _Runs(srcs, dsts, [1] * len(srcs))


def _runs(units: Sequence[tuple[int, int]]) -> _Runs:
    """The units as runs, in order: with a large handoff, looking at each unit once is what planning costs."""
    num_units = len(units)
    first_src, first_dst = units[0]
    last_src, last_dst = units[-1]
    if last_src - first_src == last_dst - first_dst == num_units - 1:
        whole = zip(range(first_src, last_src + 1), range(first_dst, last_dst + 1), strict=True)
        if all(map(eq, units, whole)):
            return _Runs((first_src,), (first_dst,), (num_units,))
    starts = [
        index
        for index, ((last_src, last_dst), (src, dst)) in enumerate(pairwise(units), 1)
        if src != last_src + 1 or dst != last_dst + 1
    ]
    starts.insert(0, 0)
    lengths = [end - start for start, end in pairwise([*starts, num_units])]
    heads = [units[start] for start in starts]
    return _Runs([src for src, _ in heads], [dst for _, dst in heads], lengths)


def _require_distinct(runs: _Runs) -> None:
    if max(runs.lengths) == 1 and len(set(runs.dsts)) == len(runs.dsts):
        return
    end: int | None = None
    for dst, length in sorted(zip(runs.dsts, runs.lengths, strict=True)):
        if end is not None and dst < end:
            raise InvalidRequestError("destination units", f"{dst} is repeated")
        end = dst + length


def _copies(segment: _Segment, runs: _Runs) -> list[Copy]:
    """One copy a run when the segment fills its units, else one a unit."""
    srcs, dsts, lengths = runs
    src_base, src_stride, num_bytes = segment.src_base, segment.src_stride, segment.num_bytes
    dst_base, dst_stride = segment.dst_base, segment.dst_stride
    if len(srcs) == 1:
        (src,), (dst,), (length,) = runs
        _require_range(segment, src, src + length, dst, dst + length)
        if segment.spans_units:
            return [Copy(src_base + src * src_stride, dst_base + dst * dst_stride, num_bytes * length)]
    else:
        ends = max(map(add, srcs, lengths)), max(map(add, dsts, lengths))
        _require_range(segment, min(srcs), ends[0], min(dsts), ends[1])
    if not segment.spans_units:
        srcs, dsts, lengths = runs.as_units
    return [
        Copy(src_base + src * src_stride, dst_base + dst * dst_stride, num_bytes * length)
        for src, dst, length in zip(srcs, dsts, lengths, strict=True)
    ]


def _require_range(segment: _Segment, first_src: int, src_end: int, first_dst: int, dst_end: int) -> None:
    assert 0 <= first_src < src_end <= segment.src_units, (
        f"source units {first_src}..{src_end - 1} are outside [0, {segment.src_units})"
    )
    if not 0 <= first_dst < dst_end <= segment.dst_units:
        problem = f"{first_dst}..{dst_end - 1} are outside [0, {segment.dst_units})"
        raise InvalidRequestError("destination units", problem)
