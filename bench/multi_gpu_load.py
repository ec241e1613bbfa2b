"""What is asked of every pair of engines in the measurements over two devices."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """Answers measured together.

    Attributes:
        tokens: of every answer.
        together: decodes begin when all prompts are there, so that there is a time in which nothing else happens.
        groups: runs of `concurrency` prompts each.
        repeats: of all groups.
    """

    concurrency: int
    tokens: int
    together: bool
    groups: int
    repeats: int = 1

    @property
    def name(self) -> str:
        """As it stands in results."""
        together = ", decoding together" if self.together else ""
        return f"concurrency {self.concurrency}, {self.tokens} tokens{together}"


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of every pair.

    Attributes:
        prompt_len: tokens of every prompt.
        concurrencies: the most telling first.
        output_tokens: of short answers: what a first round's tree is worth is spread over them.
        steady_tokens: of long ones at concurrency 3 and more.
        steady_repeats: runs of long answers.
        num_prompts: different prompts at concurrency 1 and 2.
        own_tokens: at the end of every prompt, where prompts share the rest; 0: they share nothing.
        num_pages: of a decode.
        prefill_pages: of a prefill; 0: as many.
        texts: prompts of text, for heads that draft nothing useful behind others; cut to `prompt_len`.
        start_s: seconds that must be left for a pair to be started at all.
        ttft_s: that every request adds to the time until all prompts are there, generously; with it and the two below
            an ask that does not fit into the time left is not begun.
        tpot_s: a token's time.
        more_tpot_s: that every request under way adds to it.
    """

    prompt_len: int
    concurrencies: Sequence[int]
    output_tokens: int
    steady_tokens: int
    num_pages: int
    steady_repeats: int = 1
    num_prompts: int = 16
    own_tokens: int = 0
    prefill_pages: int = 0
    page_size: int = 16
    chunk_tokens: int = 1024
    threads: int = 4
    texts: Sequence[Sequence[int]] = ()
    start_s: float = 28.0
    ttft_s: float = 0.08
    tpot_s: float = 0.0055
    more_tpot_s: float = 0.0001

    @classmethod
    def of_gpu(cls, prompt_len: int) -> "Load":
        """8B shapes, prompts that are computed anew for every request."""
        tokens = 512
        return cls(prompt_len, (32, 8, 2, 1), 64, tokens, _pages(prompt_len + tokens))

    @classmethod
    def of_long_prompts(cls, prompt_len: int) -> "Load":
        """Prompts that take longer to compute than there is time for: they share all but their ends, which the
        prefill computes once and keeps. A decode holds every one's KV.
        """
        tokens, pages_each = 384, -(-prompt_len // 16)
        return cls(
            prompt_len,
            (32, 8, 1),
            64,
            tokens,
            _pages(prompt_len + tokens),
            num_prompts=8,
            own_tokens=64,
            prefill_pages=3 * pages_each,
            chunk_tokens=4096,
            ttft_s=0.15,
            more_tpot_s=0.00055,
        )

    @classmethod
    def of_texts(cls, prompt_len: int, texts: Sequence[Sequence[int]]) -> "Load":
        """A small model: a window lasts half a second, so there are several."""
        tokens = 1024
        return cls(
            prompt_len,
            (8, 32, 2, 1),
            64,
            tokens,
            _pages(prompt_len + tokens),
            steady_repeats=3,
            texts=texts,
            start_s=20.0,
            ttft_s=0.03,
            tpot_s=0.002,
        )

    @classmethod
    def small(cls) -> "Load":
        """For trying the logic on a CPU."""
        return cls(
            32,
            (4, 1),
            12,
            48,
            64,
            num_prompts=2,
            own_tokens=8,
            chunk_tokens=32,
            threads=1,
            start_s=12.0,
        )

    @property
    def keeps_prompts(self) -> bool:
        """The prefill has a prefix cache."""
        return self.own_tokens > 0

    def short(self, concurrency: int) -> Ask:
        """Answers of `output_tokens`, begun as their prompts come."""
        groups = -(-self.num_prompts // concurrency) if concurrency <= 2 else 1
        return Ask(concurrency, self.output_tokens, together=False, groups=groups)

    def steady(self, concurrency: int) -> Ask:
        """Where rates are taken from: long answers above concurrency 2, the short ones else."""
        if concurrency <= 2:
            return self.short(concurrency)
        return Ask(concurrency, self.steady_tokens, together=True, groups=1, repeats=self.steady_repeats)

    def asks(self) -> list[Ask]:
        """All of them, the most telling first."""
        return list(
            dict.fromkeys(ask for count in self.concurrencies for ask in (self.steady(count), self.short(count)))
        )

    def needs_s(self, ask: Ask) -> float:
        """Seconds that an ask takes, with its warm-up and the end of its engines."""
        token_s = self.tpot_s + ask.concurrency * self.more_tpot_s
        prompts_s = ask.concurrency * self.ttft_s
        return 3.0 + prompts_s + ask.groups * ask.repeats * (prompts_s + ask.tokens * token_s)

    def groups(self, ask: Ask, vocab: int) -> list[list[list[int]]]:
        """Prompts of every run, all different, unless there are fewer texts; the same for every ask of this kind."""
        prompts = [self._prompt(row, vocab) for row in range(ask.groups * ask.concurrency)]
        return [prompts[first : first + ask.concurrency] for first in range(0, len(prompts), ask.concurrency)]

    def _prompt(self, row: int, vocab: int) -> list[int]:
        if self.texts:
            return list(self.texts[row % len(self.texts)])[: self.prompt_len]
        limit = min(vocab - 2, 30000) - 2
        shared = self.prompt_len - self.own_tokens if self.own_tokens else 0
        own = ((31 * row + 7 * index) % limit + 2 for index in range(shared, self.prompt_len))
        return [*((7 * index) % limit + 2 for index in range(shared)), *own]


def _pages(tokens: int, requests: int = 32, page_size: int = 16) -> int:
    """For so many requests of so many tokens, with room for trees, and for one more."""
    return (requests + 1) * (-(-(tokens + 64) // page_size) + 1)
