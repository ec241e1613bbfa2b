"""Which stream stages compute on."""

from contextlib import nullcontext

import pytest
import torch

from graftline.engine import stage_stream
from graftline.engine.stage_stream import on_stage_stream


class Stream:
    """Stands for a stream of a GPU that is not there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


def test_all_of_a_process_on_one_gpu_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured rounds of two stages must not run side by side."""
    entered: list[Stream] = []

    def enter(stream: Stream) -> nullcontext[None]:
        entered.append(stream)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    stage_stream._stream.cache_clear()
    try:
        for name in ("cuda:0", "cuda:0", "cuda:1"):
            with on_stage_stream(torch.device(name)):
                pass
    finally:
        stage_stream._stream.cache_clear()
    first, again, other = entered
    assert first is again
    assert (first.device.index, other.device.index) == (0, 1)


def test_a_cpu_has_none() -> None:
    with on_stage_stream(torch.device("cpu")):
        assert float(torch.ones(2).sum()) == 2
