"""What must be equal on both sides of a handoff, compared by name.

The values are opaque here: whoever builds a fingerprint decides what goes in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from graftline.errors import IncompatibleError
from graftline.proto.v1 import common_pb2

_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One field whose values differ; an absent field reads `(absent)`."""

    field: str
    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"{self.field}: prefill has {self.prefill}, decode has {self.decode}"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Field names and values, all text."""

    fields: Mapping[str, str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))

    def to_proto(self) -> common_pb2.Fingerprint:
        """The wire form."""
        return common_pb2.Fingerprint(fields=dict(self.fields))

    @classmethod
    def from_proto(cls, message: common_pb2.Fingerprint) -> "Fingerprint":
        """Reads a peer's fingerprint."""
        return cls(dict(message.fields))


def compare(prefill: Fingerprint, decode: Fingerprint) -> tuple[Mismatch, ...]:
    """The fields that differ or that only one side has, by name."""
    names = sorted(prefill.fields.keys() | decode.fields.keys())
    pairs = ((name, prefill.fields.get(name, _ABSENT), decode.fields.get(name, _ABSENT)) for name in names)
    return tuple(Mismatch(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs)


def require_compatible(prefill: Fingerprint, decode: Fingerprint) -> None:
    """Passes when the two may be paired.

    Raises:
        IncompatibleError: names every field that differs, one line each.
    """
    mismatches = compare(prefill, decode)
    if mismatches:
        fields = tuple(mismatch.field for mismatch in mismatches)
        raise IncompatibleError(fields, "\n".join(str(mismatch) for mismatch in mismatches))
