"""The words of the stages, as bytes."""

import pickle
from random import Random
from typing import Any

import msgspec
import pytest

from graftline.engine.plan import (
    CancelSends,
    DigestDone,
    DigestUnits,
    ForgetPeer,
    Heartbeat,
    Message,
    PageChange,
    PairPeer,
    RoundResult,
    SampledToken,
    Segment,
    SegmentOutcome,
    SendDone,
    SendOrder,
    SentPool,
    SlotOpening,
    StageAlive,
    StageFailed,
    StageReady,
    StepPlan,
    StepResult,
    StepTokens,
    Stop,
    decode,
    encode,
)
from graftline.engine.request import Token, TokenLogprob

OUTCOMES = [
    SegmentOutcome(1, [0, 2], [SampledToken(5), SampledToken(9, -0.5, [(9, -0.5), (5, -1.25)])], [9, 4], [-1, 0]),
    SegmentOutcome(2, [], [], [], [], "no finite logit"),
]
MESSAGES: list[Message] = [
    StepPlan(
        7,
        1,
        [SlotOpening(1, 0.8, 5, 0.95, 0.1, 2**63 + 5, {3: -1.5}, [2], 40, -1)],
        [PageChange(1, 3, [8, 9])],
        [Segment(1, 12, [5, 6], [-1, 0], 0, -1, [0, 1], True), Segment(2, 0, [1], None, 1, 17, [], False)],
        True,
    ),
    StepTokens(7, OUTCOMES[:1]),
    StepResult(7, 1, OUTCOMES),
    RoundResult(7, 1, [3, 0], bytes(range(16))),
    Heartbeat(3),
    Stop(),
    StageReady(1, b"\x00layout"),
    StageAlive(1, 3, 0.25, 9),
    StageFailed(1, "out of memory"),
    PairPeer("peer", b"\xff"),
    ForgetPeer("peer"),
    SendOrder(4, "r/0", "peer", 7, SentPool.DRAFT, [(1, 2, 1), (3, 4, 2)]),
    CancelSends("r/0"),
    SendDone(4, 1, 4096, 0.01, "refused", False, b"\x00\xff"),
    DigestUnits(3, [(SentPool.TARGET, [4, 0]), (SentPool.STATE, [1])]),
    DigestDone(3, 1, b"\x07" * 16),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_its_bytes(message: Message) -> None:
    assert decode(encode(message)) == message


def test_every_kind_of_message_is_tried() -> None:
    kinds: Any = Message
    assert {type(message) for message in MESSAGES} == set(kinds.__args__)


class Spy:
    """Would run code if anything unpickled it."""

    called = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (setattr, (Spy, "called", True))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"garbage",
        pickle.dumps(Spy()),
        msgspec.msgpack.encode(["NoSuchMessage", 1]),
        msgspec.msgpack.encode(["StepResult", "seven", 1, []]),
        msgspec.msgpack.encode(["StepResult", 7]),
        msgspec.msgpack.encode({"type": "Stop"}),
        b"\xdd\xff\xff\xff\xff",
        encode(MESSAGES[0])[:-1],
        encode(MESSAGES[0]) + b"\x00",
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    """CASES Z01: nothing but the known messages comes out of bytes, and nothing runs."""
    with pytest.raises(msgspec.DecodeError):
        decode(data)
    assert not Spy.called


def test_flipped_bytes_give_a_message_or_a_refusal() -> None:
    draw, data = Random(0), encode(MESSAGES[0])
    refused = 0
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            assert isinstance(decode(bytes(damaged)), msgspec.Struct)
        except (msgspec.DecodeError, UnicodeDecodeError):
            refused += 1
    assert refused > 100


def test_rows_and_tokens_as_others_see_them() -> None:
    plan = MESSAGES[0]
    assert isinstance(plan, StepPlan)
    assert plan.num_rows == 3
    assert OUTCOMES[0].tokens[0].to_token() == Token(5)
    assert OUTCOMES[0].tokens[1].to_token() == Token(9, TokenLogprob(-0.5, ((9, -0.5), (5, -1.25))))
    tree = OUTCOMES[0].tree()
    assert tree is not None
    assert (tree.tokens, tree.parents) == ((9, 4), (-1, 0))
    assert OUTCOMES[1].tree() is None
