"""One choice's output: every split of the same tokens gives the same text, ids and ending."""

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from router_fakes import EOS, model_card
from router_harness import request

from graftline.proto.v1.common_pb2 import FinishReason, TokenLogprob
from graftline.proto.v1.decode_pb2 import DecodeTokens
from graftline.router.model import ServedModel
from graftline.router.parameters import Parameters, Plan
from graftline.router.transcript import Ending, Transcript

MODEL = ServedModel.load(model_card())


def transcript(**fields: Any) -> Transcript:
    parameters = Parameters.of(request(text="x", **fields), MODEL)
    plan = Plan.of(
        MODEL,
        [120],
        parameters,
        max_request_tokens=100,
        max_prompt_tokens=100,
        default_max_tokens=None,
        field="text",
        goes_on=True,
    )
    return Transcript(plan, 0)


def run(ids: list[int], cuts: list[int], **fields: Any) -> tuple[str, list[int], Ending | None]:
    made = transcript(**fields)
    text = ""
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for start, end in pairwise(edges):
        delta = made.take(DecodeTokens(token_ids=ids[start:end]))
        assert made.token_ids[len(made.token_ids) - len(delta.token_ids) :] == delta.token_ids
        text += delta.text
    text += made.end(Ending(FinishReason.FINISH_REASON_LENGTH))
    return text, made.token_ids, made.ending


@given(
    st.lists(st.sampled_from([*b"ab ", *"é😀".encode(), EOS]), min_size=1, max_size=20),
    st.lists(st.integers(1, 20), max_size=6),
    st.lists(st.sampled_from(["ab", "a b", "é", "😀b", "bb"]), max_size=3),
    st.integers(0, 4),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_the_split_into_rounds_changes_nothing(
    ids: list[int], cuts: list[int], stop: list[str], min_tokens: int, ignore_eos: bool
) -> None:
    """CASES A04, S01, S03, S04, I13: nor does it matter that the first token comes by itself, from another worker."""
    fields = {"stop": stop, "min_tokens": min_tokens, "ignore_eos": ignore_eos, "max_tokens": 15}
    whole = run(ids, [], **fields)
    assert run(ids, cuts, **fields) == whole
    assert run(ids, list(range(20)), **fields) == whole
    text, taken, ending = whole
    assert ending is not None
    assert len(taken) <= 15
    if ending.stop_string:
        full = bytes(token_id for token_id in taken if token_id < 256).decode("utf-8", "replace")
        assert full.startswith(text + ending.stop_string)
    if EOS in taken and not ignore_eos:
        assert taken.index(EOS) == len(taken) - 1


def test_stop_strings_count_only_after_min_tokens() -> None:
    assert run(list(b"abab"), [], stop=["ab"], min_tokens=2)[0] == "ab"
    assert run(list(b"abab"), [], stop=["ab"], min_tokens=1)[0] == "ab"
    text, ids, ending = run(list(b"abab"), [], stop=["ab"])
    assert (text, ids) == ("", list(b"ab"))
    assert ending is not None
    assert ending.stop_string == "ab"


def test_eos_is_an_ordinary_token_when_ignored() -> None:
    """CASES S04."""
    text, ids, ending = run([97, EOS, 98], [], ignore_eos=True)
    assert (text, ids) == ("ab", [97, EOS, 98])
    assert ending == Ending(FinishReason.FINISH_REASON_LENGTH)


def test_logprobs_are_cut_with_their_tokens() -> None:
    made = transcript(stop_token_ids=[98], logprobs=0)
    entries = [TokenLogprob(logprob=-float(n)) for n in range(3)]
    delta = made.take(DecodeTokens(token_ids=b"abc", logprobs=entries))
    assert [entry.logprob for entry in delta.logprobs] == [0, -1]
    assert made.ending == Ending(FinishReason.FINISH_REASON_STOP, stop_token_id=98)
    assert delta.text == "a"
