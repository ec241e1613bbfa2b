"""The rules that workers apply again to what reaches them."""

import math
from typing import Any

import pytest

from graftline.errors import InvalidRequestError
from graftline.proto import validation
from graftline.proto.v1.common_pb2 import SamplingParams, StoppingParams
from graftline.proto.v1.decode_pb2 import DecodeServiceGenerateRequest
from graftline.proto.v1.prefill_pb2 import PrefillStart
from graftline.proto.validation import ModelLimits, check_decode_request, check_prefill_start

LIMITS = ModelLimits(vocab_size=100, context_length=50)


def decode_request(**changes: Any) -> DecodeServiceGenerateRequest:
    sampling = SamplingParams(**{"top_p": 1.0, **changes.pop("sampling", {})})
    stopping = StoppingParams(**{"max_tokens": 10, **changes.pop("stopping", {})})
    fields = {"request_id": "r", "attempt": 1, "prefill_address": "p:1", "token_ids": [1, 2, 3], "num_prompt_tokens": 3}
    return DecodeServiceGenerateRequest(**{**fields, **changes}, sampling=sampling, stopping=stopping)


GOOD: list[dict[str, Any]] = [
    {},
    {"token_ids": [0, 99]} | {"num_prompt_tokens": 2},
    {"token_ids": [1] * 40, "num_prompt_tokens": 40},
    {"token_ids": [1] * 12, "num_prompt_tokens": 3},
    {"stopping": {"max_tokens": 47, "min_tokens": 47, "stop_token_ids": [0, 99]}},
    {"sampling": {"temperature": validation.MIN_TEMPERATURE, "top_k": 2**32 - 1, "min_p": 1.0}},
    {"sampling": {"temperature": 100.0, "logit_bias": {99: -100.0}}},
    {"logprobs": 20},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"request_id": ""}, "request_id"),
    ({"request_id": "x" * 300}, "request_id"),
    ({"attempt": 0}, "attempt"),
    ({"prefill_address": "nowhere"}, "prefill_address"),
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [1, 100, 3]}, "token_ids[1]"),
    ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
    ({"num_prompt_tokens": 4}, "num_prompt_tokens"),
    ({"token_ids": [1] * 13}, "token_ids"),
    ({"token_ids": [1] * 50, "num_prompt_tokens": 50}, "prompt"),
    ({"stopping": {"max_tokens": 48}}, "max_tokens"),
    ({"stopping": {"max_tokens": 0}}, "max_tokens"),
    ({"stopping": {"min_tokens": 11}}, "min_tokens"),
    ({"stopping": {"stop_token_ids": [100]}}, "stop_token_ids"),
    ({"sampling": {"temperature": -1}}, "temperature"),
    ({"sampling": {"temperature": math.nan}}, "temperature"),
    ({"sampling": {"temperature": 1e-30}}, "temperature"),
    ({"sampling": {"top_p": 0}}, "top_p"),
    ({"sampling": {"top_p": math.nan}}, "top_p"),
    ({"sampling": {"min_p": math.inf}}, "min_p"),
    ({"sampling": {"logit_bias": {100: 1.0}}}, "logit_bias"),
    ({"sampling": {"logit_bias": {1: math.inf}}}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
]


@pytest.mark.parametrize("changes", GOOD)
def test_good_requests_pass(changes: dict[str, Any]) -> None:
    request = decode_request(**changes)
    if len(request.token_ids) == 12:
        request.stopping.max_tokens = 10
    check_decode_request(request, LIMITS)


@pytest.mark.parametrize(("changes", "field"), BAD)
def test_bad_requests_name_field_and_value(changes: dict[str, Any], field: str) -> None:
    """CASES I03, I04, I05, I06, I07: the same rules in router and servers."""
    with pytest.raises(InvalidRequestError) as caught:
        check_decode_request(decode_request(**changes), LIMITS)
    assert caught.value.field == field
    assert caught.value.problem


def test_prefills_apply_the_same_rules_and_want_incarnations() -> None:
    request = decode_request()
    start = PrefillStart(
        request_id="r",
        attempt=1,
        decode_incarnation="d",
        prefill_incarnation="p",
        token_ids=request.token_ids,
        num_prompt_tokens=3,
        sampling=request.sampling,
        stopping=request.stopping,
    )
    check_prefill_start(start, LIMITS)
    start.stopping.max_tokens = 48
    check_prefill_start(start, LIMITS)  # the output is the decode's, whose pool may be the larger one
    check_prefill_start(start, ModelLimits(vocab_size=100, context_length=4))
    with pytest.raises(InvalidRequestError, match="3 tokens leave no room for output in a context of 3"):
        check_prefill_start(start, ModelLimits(vocab_size=100, context_length=3))
    start.token_ids[0] = 100
    with pytest.raises(InvalidRequestError, match=r"token_ids\[0\]"):
        check_prefill_start(start, LIMITS)
    start.decode_incarnation = ""
    with pytest.raises(InvalidRequestError, match="decode_incarnation"):
        check_prefill_start(start, LIMITS)


def test_values_that_only_the_edge_sees() -> None:
    for call in (
        lambda: validation.check_stop_strings([""]),
        lambda: validation.check_stop_strings(["x" * 1025]),
        lambda: validation.check_stop_strings(["x"] * 65),
        lambda: validation.check_num_choices(0),
        lambda: validation.check_num_choices(65),
        lambda: validation.check_seed(-1),
        lambda: validation.check_seed(2**64),
        lambda: validation.check_max_tokens(2**20 + 1),
        lambda: validation.check_top_k(-1),
        lambda: validation.check_request_id("a\x00b"),
    ):
        with pytest.raises(InvalidRequestError):
            call()
