"""Lists of the host on a device."""

import torch

from graftline.kernels.upload import RecurringUploads


def test_a_list_that_comes_again_is_not_uploaded_again() -> None:
    uploads = RecurringUploads(torch.device("cpu"), most=2)
    first = uploads.of([3, 1])
    assert first.dtype == torch.int64
    assert first.tolist() == [3, 1]
    assert uploads.of([1, 3]).tolist() == [1, 3]
    assert uploads.of([3, 1]) is first
    assert uploads.of([]).tolist() == []
    assert uploads.of([3, 1]) is not first, "a third list was one too many to keep them all"
    assert uploads.of([3, 1]).tolist() == [3, 1]
