"""Which stream stages compute and capture on."""

from contextlib import nullcontext

import pytest
import torch

from graftline.engine import graph_capture
from graftline.engine.stage_stream import StageStream


class Stream:
    """Stands for a stream of a GPU that is not there."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self.device = device
        self.priority = priority


def test_every_stage_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Stream] = []

    def enter(stream: Stream) -> nullcontext[None]:
        entered.append(stream)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    device = torch.device("cuda:0")
    one, other = StageStream(device), StageStream(device, urgent=True)
    for stage in (one, one, other):
        with stage.entered():
            pass
    assert entered[0] is entered[1] is not entered[2]
    assert {stream.device for stream in entered} == {device}
    assert entered[2].priority < entered[0].priority, "as CUDA counts them"


def test_a_cpu_has_none() -> None:
    with StageStream(torch.device("cpu")).entered():
        assert float(torch.ones(2).sum()) == 2


@pytest.mark.parametrize(("current", "expected"), [("default", None), ("own", "own")])
def test_graphs_are_captured_where_they_are_replayed(
    current: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries give a stream a workspace: graphs captured on one stream must not be replayed side by side."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    assert graph_capture._capturing_stream(torch.device("cuda:0")) == expected
