"""What every engine checks of a request again, whoever checked before."""

import math

from graftline.engine.request import Request, Sampling
from graftline.errors import InvalidRequestError


def check_request(request: Request, context_len: int, vocab_size: int) -> None:
    """Checks a request for a model and the pools of a worker.

    Args:
        context_len: most tokens of prompt and output that they can hold.
        vocab_size: token ids are below this.

    Raises:
        InvalidRequestError: naming field and value.
    """
    if not request.token_ids:
        raise InvalidRequestError("token_ids", "the prompt is empty")
    for token_id in (min(request.token_ids), max(request.token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError("token_ids", f"{token_id} is not in 0..{vocab_size - 1}")
    if len(request.token_ids) >= context_len:
        raise InvalidRequestError(
            "token_ids", f"a prompt of {len(request.token_ids)} tokens leaves no room in a context of {context_len}"
        )
    if request.stopping.max_tokens <= request.num_earlier_tokens:
        raise InvalidRequestError(
            "max_tokens", f"{request.stopping.max_tokens} with {request.num_earlier_tokens} emitted"
        )
    for field, ids in (
        ("stop_token_ids", request.stopping.ending_ids),
        ("logit_bias", frozenset(request.sampling.logit_bias)),
    ):
        foreign = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
        if foreign:
            raise InvalidRequestError(field, f"{foreign[0]} is not in 0..{vocab_size - 1}")
    _check_sampling(request.sampling)


def _check_sampling(sampling: Sampling) -> None:
    in_range = {
        "temperature": math.isfinite(sampling.temperature) and sampling.temperature >= 0,
        "top_k": sampling.top_k >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "min_p": 0 <= sampling.min_p <= 1,
        "seed": 0 <= sampling.seed < 1 << 64,
        "logit_bias": all(map(math.isfinite, sampling.logit_bias.values())),
    }
    for field, holds in in_range.items():
        if not holds:
            raise InvalidRequestError(field, f"{getattr(sampling, field)} is out of range")
