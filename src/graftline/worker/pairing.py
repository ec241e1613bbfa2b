"""Which fields of two fingerprints differ."""

from dataclasses import dataclass

from graftline.proto.v1.common_pb2 import Fingerprint

_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One field that must agree and does not."""

    field: str
    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"{self.field}: prefill has {self.prefill}, decode has {self.decode}"


def compare(prefill: Fingerprint, decode: Fingerprint) -> list[Mismatch]:
    """Every field that differs, by name; empty when the two may work together."""
    names = sorted(set(prefill.fields) | set(decode.fields))
    pairs = [(name, prefill.fields.get(name, _ABSENT), decode.fields.get(name, _ABSENT)) for name in names]
    return [Mismatch(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs]
