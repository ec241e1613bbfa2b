"""What a chaos run asks for: requests of many kinds drawn from one seed, each with the answer it must get.

Answers come from the plain one-process model. Requests share a pool of prompts, so that a few hundred plain answers
check any number of them, and prompts share beginnings, so that prefix caches have something to find.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.load import load_model
from graftline.engine.models.reference import generate
from graftline.errors import InvalidRequestError

_BASES = 6
_SEEDED_SHARE = 0.4
_ENDING_SHARE = 0.3
_TWO_CHOICES_SHARE = 0.05
_ONE_TOKEN_SHARE = 0.05
_LEAVE_MAX_S = 0.6
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request samples; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        expected: its whole answer.
        stop_token_ids: end the answer where one of them comes.
        leave_after_tokens, leave_after_s: the caller leaves then; None: it stays.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    expected: tuple[int, ...]
    stop_token_ids: tuple[int, ...] = ()
    num_choices: int = 1
    leave_after_tokens: int | None = None
    leave_after_s: float | None = None

    @property
    def leaves(self) -> bool:
        """The caller does not wait for the end."""
        return self.leave_after_tokens is not None or self.leave_after_s is not None


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many plain answers are computed, and how long prompts and answers get, in tokens."""

    num_prompts: int = 120
    max_prompt_len: int = 200
    max_tokens: int = 40


class AskBook:
    """Draws requests; equal arguments give equal requests.

    Args:
        edge: page and chunk sizes, around whose multiples prompt lengths gather.
        cancel_share: of callers that leave early.
        on_answer: hears how many plain answers there are, after each.

    Raises:
        InvalidRequestError: the model's context is too short for `size`.
    """

    def __init__(
        self,
        model: Path,
        dtype: str,
        seed: int,
        size: PoolSize,
        edge: Sequence[int],
        cancel_share: float,
        on_answer: Callable[[int], None],
    ) -> None:
        checkpoint = open_checkpoint(model)
        config = checkpoint.config
        if config.context_length < size.max_prompt_len + size.max_tokens:
            wanted = size.max_prompt_len + size.max_tokens
            raise InvalidRequestError("model", f"its context of {config.context_length} is below {wanted} tokens")
        self._seed = seed
        self._max_tokens = size.max_tokens
        self._cancel_share = cancel_share
        draw = Random(f"pool/{seed}")
        vocab = min(config.vocab_size, *(checkpoint.card.eos_token_ids or (config.vocab_size,)))
        bases = [[draw.randrange(vocab) for _ in range(size.max_prompt_len)] for _ in range(_BASES)]
        plain = load_model(checkpoint, range(config.num_layers), _DTYPES[dtype])
        self._pool: list[tuple[tuple[int, ...], Sampling, tuple[int, ...]]] = []
        for index in range(size.num_prompts):
            prompt = _drawn_prompt(draw, bases, size.max_prompt_len, vocab, edge)
            sampling = Sampling()
            if draw.random() < _SEEDED_SHARE:
                sampling = Sampling(draw.choice((0.5, 0.8, 1.2)), draw.choice((0, 20)), draw.choice((1.0, 0.9)), index)
            with torch.inference_mode():
                answer = generate(
                    plain,
                    prompt,
                    size.max_tokens,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    seed=sampling.seed,
                )
            self._pool.append((prompt, sampling, tuple(answer)))
            on_answer(len(self._pool))

    def ask(self, number: int) -> Ask:
        """The request of that number."""
        draw = Random(f"ask/{self._seed}/{number}")
        prompt, sampling, answer = draw.choice(self._pool)
        max_tokens = 1 if draw.random() < _ONE_TOKEN_SHARE else draw.randint(2, self._max_tokens)
        expected = answer[:max_tokens]
        stop_token_ids: tuple[int, ...] = ()
        if draw.random() < _ENDING_SHARE:
            stop = draw.choice(answer)
            stop_token_ids = (stop,)
            if stop in expected:
                expected = expected[: expected.index(stop) + 1]
        two = sampling.temperature == 0 and draw.random() < _TWO_CHOICES_SHARE
        leave_tokens, leave_s = None, None
        if draw.random() < self._cancel_share:
            if draw.random() < 0.5:
                leave_tokens = draw.randint(1, max(1, len(expected) - 1))
            else:
                leave_s = draw.uniform(0, _LEAVE_MAX_S)
        return Ask(
            number, prompt, sampling, max_tokens, expected, stop_token_ids, 2 if two else 1, leave_tokens, leave_s
        )


def _drawn_prompt(
    draw: Random, bases: Sequence[Sequence[int]], longest: int, vocab: int, edge: Sequence[int]
) -> tuple[int, ...]:
    """A prompt of 1 to `longest` tokens: often just at a page's or chunk's end, often with a shared beginning."""
    length = draw.randint(1, longest)
    if draw.random() < 0.5:
        size = draw.choice(edge)
        length = min(longest, max(1, size * draw.randint(1, max(1, longest // size)) + draw.choice((-1, 0, 1))))
    shared = draw.randint(0, length) if draw.random() < 0.6 else 0
    own = [draw.randrange(vocab) for _ in range(length - shared)]
    return (*draw.choice(bases)[:shared], *own)
