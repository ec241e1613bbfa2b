"""Which stream stages compute on."""

import pytest
import torch

from graftline.engine.stage_stream import on_stream, stage_stream


class Stream:
    """Stands for a stream of a GPU that is not there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


def test_all_of_a_process_on_one_gpu_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured rounds of two stages must not run side by side."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    stage_stream.cache_clear()
    try:
        first, again, other = (stage_stream(torch.device(name)) for name in ("cuda:0", "cuda:0", "cuda:1"))
    finally:
        stage_stream.cache_clear()
    assert first is again
    assert isinstance(first, Stream)
    assert isinstance(other, Stream)
    assert (first.device.index, other.device.index) == (0, 1)


def test_a_cpu_has_none() -> None:
    assert stage_stream(torch.device("cpu")) is None
    with on_stream(None):
        assert float(torch.ones(2).sum()) == 2
