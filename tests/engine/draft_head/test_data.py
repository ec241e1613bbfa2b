"""Self-written dialogs: their structure, their answers, their repeatability."""

from pathlib import Path

import pytest
import torch

from graftline.engine.draft_head.answers import Prompt, write_answers
from graftline.engine.draft_head.corpus import batches, coverage, draft_vocabulary
from graftline.engine.draft_head.data import DialogGenerator, Dialogs, WritingOptions, draw
from graftline.engine.draft_head.dialogs import DialogWriter
from graftline.engine.draft_head.target import Target, TargetRunner
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.reference import generate

WRITING = WritingOptions(max_user_len=12, max_answer_len=20)


@pytest.fixture(scope="module")
def runner(tiny_target: Path) -> TargetRunner:
    return TargetRunner(Target.load(open_checkpoint(tiny_target), torch.device("cpu"), torch.float32), compiled=False)


@pytest.fixture(scope="module")
def writer(tiny_target: Path) -> DialogWriter:
    return DialogWriter(open_checkpoint(tiny_target).card)


@pytest.fixture(scope="module")
def dialogs(runner: TargetRunner, writer: DialogWriter) -> Dialogs:
    torch.manual_seed(5)
    prefixes = [writer.open_user_turn_ids("", start) for start in ("the", "one two", "", "a small boat")]
    return DialogGenerator(runner, writer.format, WRITING, compiled=False).write(prefixes, 120, torch.zeros(4))


def test_rows_alternate_between_user_turns_and_answers(dialogs: Dialogs, writer: DialogWriter) -> None:
    for tokens in dialogs.tokens.tolist():
        text = writer.decode(tokens)
        turns = text.split("<|im_end|>\n")
        roles = [turn.split("\n")[0].removeprefix("<|im_start|>") for turn in turns]
        assert len(turns) >= 3
        assert all(role == ("user", "assistant")[n % 2] for n, role in enumerate(roles[:-1])), text


def test_answers_mark_just_the_tokens_of_answers(dialogs: Dialogs, writer: DialogWriter) -> None:
    to_answer, to_user = list(writer.format.user_to_answer), list(writer.format.answer_to_user)
    for tokens, answers in zip(dialogs.tokens.tolist(), dialogs.answers.tolist(), strict=True):
        starts = [n for n in range(1, len(tokens)) if answers[n] and not answers[n - 1]]
        assert starts
        for start in starts:
            assert tokens[start - len(to_answer) : start] == to_answer
            stop = next((n for n in range(start, len(tokens)) if not answers[n]), None)
            if stop is not None:
                ended = tokens[stop - 1] == to_user[0]
                assert tokens[stop - ended : stop - ended + len(to_user)] == to_user[: len(tokens) - stop + ended]
            assert (stop or len(tokens)) - start <= WRITING.max_answer_len + 1


def test_greedy_answers_are_the_targets_likeliest_tokens(dialogs: Dialogs, runner: TargetRunner) -> None:
    logits = runner.features(dialogs.tokens.long(), (-1,)).final @ runner.target.lm_head.T
    best = logits.argmax(-1)[:, :-1]
    agree = (best == dialogs.tokens[:, 1:])[dialogs.answers[:, 1:]]
    assert agree.float().mean() > 0.98


def test_equal_seeds_write_equal_dialogs(runner: TargetRunner, writer: DialogWriter) -> None:
    generator = DialogGenerator(runner, writer.format, WRITING, compiled=False)
    written = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        written.append(generator.write([writer.open_user_turn_ids("", "the")] * 2, 60, torch.ones(2)).tokens)
    assert torch.equal(written[0], written[1])
    assert not torch.equal(written[0], written[2])
    assert not torch.equal(written[0][0], written[0][1])


def test_draw_follows_the_distribution_above_the_floor() -> None:
    torch.manual_seed(0)
    probabilities = torch.tensor([0.6, 0.3, 0.099, 0.001])
    logits = probabilities.log().expand(20000, 4)
    drawn = draw(logits, torch.ones(20000), 0.01)
    shares = torch.bincount(drawn, minlength=4) / 20000
    torch.testing.assert_close(shares, torch.tensor([0.6, 0.3, 0.099, 0.0]) / 0.999, atol=0.012, rtol=0)
    assert (draw(logits, torch.zeros(20000), 0.01) == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_plain_generation(
    runner: TargetRunner, writer: DialogWriter, tiny_target: Path, temperature: float
) -> None:
    """CASES S36: what acceptance is measured on is what serving would emit, seed and position included."""
    texts = ("hello", "the cat", "call get_weather now please")
    prompts = [Prompt(tuple(writer.prompt_ids([{"role": "user", "content": text}])), "chat") for text in texts]
    ends = writer.format.end_ids
    answers = write_answers(runner, prompts, ends, temperature=temperature, seed=7, max_new_tokens=25, batch_rows=2)
    model = DenseModel(open_checkpoint(tiny_target), range(2), torch.float32)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        plain = generate(model, prompt.token_ids, 25, eos_ids=ends, temperature=temperature, seed=7 + number)
        assert answer.tokens.tolist() == [*prompt.token_ids, *plain]
        assert answer.num_prompt_tokens == len(prompt.token_ids)


def test_draft_vocabulary_keeps_frequent_answer_tokens_and_what_it_must() -> None:
    tokens = torch.tensor([[1, 2, 2, 3, 3, 3], [4, 5, 5, 5, 5, 5]], dtype=torch.int32)
    answers = torch.tensor([[True] * 6, [False] * 6])
    dialogs = Dialogs(tokens, answers)
    kept = draft_vocabulary(dialogs, 10, 4, always=[9])
    assert kept.tolist() == [1, 2, 3, 9]
    assert coverage(dialogs, kept, 10) == 1.0
    assert coverage(dialogs, torch.tensor([3, 9]), 10) == 0.5


def test_batches_cover_every_row_once_an_epoch_and_resume_in_the_middle() -> None:
    stream = batches(10, 3, seed=4, first=0)
    first = [next(stream).tolist() for _ in range(7)]
    assert len({row for batch in first[:3] for row in batch}) == 9
    assert first[:3] != first[3:6]
    resumed = batches(10, 3, seed=4, first=4)
    assert [next(resumed).tolist() for _ in range(3)] == first[4:7]
