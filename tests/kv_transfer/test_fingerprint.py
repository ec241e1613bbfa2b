import pytest

from graftline.errors import IncompatibleError
from graftline.kv_transfer.fingerprint import Fingerprint, compare, require_compatible
from graftline.proto.v1 import common_pb2


def test_equal_fingerprints_pass_in_any_order() -> None:
    ours, theirs = Fingerprint({"dtype": "bf16", "page_size": "16"}), Fingerprint({"page_size": "16", "dtype": "bf16"})
    assert compare(ours, theirs) == ()
    require_compatible(ours, theirs)


def test_every_differing_or_absent_field_is_named() -> None:
    ours = Fingerprint({"dtype": "bf16", "page_size": "16", "model_hash": "a", "draft_depth": "3"})
    theirs = Fingerprint({"dtype": "f32", "page_size": "16", "model_hash": "b", "vocab_size": "8"})
    with pytest.raises(IncompatibleError) as caught:
        require_compatible(ours, theirs)
    assert caught.value.fields == ("draft_depth", "dtype", "model_hash", "vocab_size")
    assert "dtype: prefill has bf16, decode has f32" in str(caught.value)
    assert "vocab_size: prefill has (absent), decode has 8" in str(caught.value)


def test_a_fingerprint_survives_the_wire_and_later_changes_of_its_source() -> None:
    fields = {"dtype": "bf16"}
    fingerprint = Fingerprint(fields)
    fields["dtype"] = "f32"
    message = common_pb2.Fingerprint.FromString(fingerprint.to_proto().SerializeToString())
    assert Fingerprint.from_proto(message).fields == {"dtype": "bf16"}
