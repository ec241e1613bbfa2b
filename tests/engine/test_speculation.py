"""Accept lengths, ends within accepted runs, drafts that are wrong in every way, logprobs."""

import json
from pathlib import Path

import pytest
import torch
from local_pair import Ask, End, local_pair
from safetensors.torch import load_file, save_file
from tiny_world import EOS, VOCAB_SIZE, TinyWorld, prompt
from torch import Tensor

from graftline.engine.draft_head.config import CONFIG_FILE, WEIGHTS_FILE, DraftHeadKind
from graftline.engine.draft_head.random import write_tiny_head
from graftline.engine.models.reference import OneRequestKv, forward
from graftline.engine.request import DraftTree, FinishReason, Sampling
from graftline.engine.tree_shape import TreeShape
from graftline.errors import InternalError, InvalidRequestError

SHAPES = (TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(5, 1, 6), TreeShape(4, 2, 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_head_that_always_agrees_accepts_everything(world: TinyWorld, shape: TreeShape) -> None:
    """CASES S21, X10: S + 1 tokens a round from the first round on; only the last round is cut."""
    chain = shape.branching == 1
    with local_pair(world.markov.path, world.agrees, tree=shape, decode_split=(2, 2)) as pair:
        for max_tokens in (2, 3, shape.depth + 2, 2 * shape.depth + 3, 22):
            answer = pair.generate(prompt(6), max_tokens)
            assert answer.ids == world.markov.answer(prompt(6), max_tokens)
            counts = answer.speculation[0]
            if chain:
                full, rest = divmod(max_tokens - 1, shape.depth + 1)
                assert counts.rounds == full + (rest > 0)
                assert counts.first_round_accepted == min(shape.depth, max_tokens - 2)
                assert counts.drafted == full * shape.depth + max(0, rest - 1)
            assert counts.rounds + counts.accepted == max_tokens - 1, "S38"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_head_that_never_agrees_costs_rounds_only(world: TinyWorld, shape: TreeShape) -> None:
    with local_pair(world.markov.path, world.disagrees, tree=shape, decode_split=(2, 2)) as pair:
        answer = pair.generate(prompt(6), 12)
    assert answer.ids == world.markov.answer(prompt(6), 12)
    assert (answer.total.rounds, answer.total.accepted) == (11, 0)


@pytest.mark.parametrize("offset", range(9))
def test_an_end_at_every_offset_of_accepted_runs(world: TinyWorld, offset: int) -> None:
    """CASES S03, S01: always-right drafts of depth 3; the end falls on every place of two runs."""
    expected = world.markov.answer(prompt(6), 16)
    stop = expected[offset]
    cut = expected[: expected.index(stop) + 1]
    with local_pair(world.markov.path, world.agrees, tree=TreeShape(3, 1, 4), decode_split=(2, 2)) as pair:
        for kind in ("eos_ids", "stop_ids"):
            answer = pair.generate(prompt(6), 16, **{kind: frozenset({stop})})
            assert (answer.ids, answer.reason) == (cut, FinishReason.STOP)


def test_ends_may_be_ignored_or_held_back(world: TinyWorld) -> None:
    """CASES A04, A07, S04: min_tokens and an ignored end, with speculation as without; every attempt counts on."""
    expected = world.markov.answer(prompt(6), 16)
    stop = frozenset({expected[2]})
    results = []
    for head in (world.agrees, None):
        shape = TreeShape(3, 1, 4) if head else None
        with local_pair(world.markov.path, head, tree=shape, decode_split=(2, 2)) as pair:
            assert pair.generate(prompt(6), 16, eos_ids=frozenset()).ids == expected
            results.append([pair.generate(prompt(6), 16, eos_ids=stop, min_tokens=count).ids for count in range(9)])
        with local_pair(world.markov.path, head, tree=shape, decode={"preempt_every": 2}) as pair:
            results.append([pair.generate(prompt(6), 16, eos_ids=stop, min_tokens=count).ids for count in range(9)])
    assert all(result == results[0] for result in results[1:])
    assert results[0][0] == results[0][2] == expected[:3]
    for count, ids in enumerate(results[0]):
        assert len(ids) >= count
        assert not stop & set(ids[:count])


def test_a_head_that_always_says_end_changes_nothing(world: TinyWorld, tmp_path: Path) -> None:
    """CASES S05: a drafted end is a proposal like any other."""
    head = write_tiny_head(tmp_path, world.plain.path, kind=DraftHeadKind.EAGLE3, draft_vocab=1)
    weights = load_file(head / WEIGHTS_FILE)
    weights["d2t"] = torch.tensor([EOS])
    save_file(weights, head / WEIGHTS_FILE)
    with local_pair(world.plain.path, head, tree=TreeShape(3, 1, 4), decode_split=(2, 2)) as pair:
        answers = pair.run([Ask(token_ids=prompt(6, seed), max_tokens=12, eos_ids=frozenset({EOS})) for seed in (0, 1)])
    for seed, answer in enumerate(answers):
        assert answer.ids == world.plain.answer(prompt(6, seed), 12, eos_ids=(EOS,))


def test_trees_that_no_peer_should_send(world: TinyWorld) -> None:
    """CASES S05: illegal ids, a foreign root or far too many nodes cost the first round's drafts, nothing else."""
    edits = {
        "illegal": lambda tree: DraftTree((tree.tokens[0], VOCAB_SIZE, -7, 1 << 40), (-1, 0, 1, 2)),
        "foreign": lambda tree: DraftTree((tree.tokens[0] ^ 1, 5), (-1, 0)),
        "huge": lambda tree: DraftTree((tree.tokens[0], *[3] * 500), (-1, *range(500))),
        "all equal": lambda tree: DraftTree((tree.tokens[0], 5, 5, 5), (-1, 0, 0, 1)),
    }
    with local_pair(world.plain.path, world.eagle, tree=TreeShape(3, 1, 4), decode_split=(2, 2)) as pair:
        answers = pair.run([Ask(token_ids=prompt(6), max_tokens=8, edit_tree=edit) for edit in edits.values()])
    assert [answer.ids for answer in answers] == [world.plain.answer(prompt(6), 8)] * len(edits)
    assert [answer.speculation[0].first_round_drafted for answer in answers] == [0, 0, 0, 3]


@pytest.mark.parametrize("head_context", [None, 32])
def test_generation_to_the_end_of_the_context(world: TinyWorld, tmp_path: Path, head_context: int | None) -> None:
    """CASES S28: context 64, prompts of 50 to 63; also a head that is made for half of it."""
    head = write_tiny_head(tmp_path, world.short.path, context=head_context)
    for shape in (TreeShape(3, 1, 4), TreeShape(4, 4, 16)):
        with local_pair(world.short.path, head, tree=shape, decode_split=(2, 2), num_pages=200) as pair:
            lengths = (20, 50, 57, 61, 62, 63)
            answers = pair.run([Ask(token_ids=prompt(length), max_tokens=100) for length in lengths])
            for length, answer in zip(lengths, answers, strict=True):
                assert answer.ids == world.short.answer(prompt(length), 64 - length)
                assert answer.reason is FinishReason.LENGTH
            with pytest.raises(InvalidRequestError, match="token_ids: a prompt of 64 tokens leaves no room"):
                pair.generate(prompt(64), 1)
    drafted = sum(answer.total.drafted for answer in answers[1:])
    assert (drafted == 0) is (head_context == 32), "no drafts past what the head was made for"


@pytest.mark.parametrize("agrees", [True, False])
def test_counts_add_up_wherever_requests_end(world: TinyWorld, agrees: bool) -> None:
    """CASES X53: no more accepted than drafted; every token behind the first is a round's own or an accepted one."""
    head = world.agrees if agrees else world.disagrees
    asks = [
        Ask(token_ids=prompt(5, seed), max_tokens=seed + 1, eos_ids=frozenset(range(40 * (seed % 3))))
        for seed in range(14)
    ]
    with local_pair(world.markov.path, head, tree=TreeShape(4, 2, 8), decode_split=(2, 2), num_pages=128) as pair:
        answers = pair.run(asks)
        totals = pair.decode.totals
    for answer in answers:
        assert answer.total.accepted <= answer.total.drafted
        assert answer.total.accepted + answer.total.rounds == len(answer.ids) - 1
        for counts in answer.speculation:
            assert counts.first_round_accepted <= counts.first_round_drafted <= counts.drafted
    assert totals.accepted <= totals.drafted
    assert totals.first_round_accepted <= totals.first_round_drafted
    assert totals.output_tokens == totals.accepted + totals.request_rounds


def test_logprobs_are_those_of_the_plain_model(world: TinyWorld) -> None:
    """CASES S07: accepted, bonus and rejected positions, greedy and sampled, several numbers side by side."""
    plain = world.markov
    sampling = Sampling(temperature=1.3, top_k=20, seed=9, logit_bias={7: 3.0})
    asks = [
        Ask(token_ids=prompt(6), max_tokens=12, logprobs=5),
        Ask(token_ids=prompt(7), max_tokens=12, logprobs=0),
        Ask(token_ids=prompt(8), max_tokens=12),
        Ask(token_ids=prompt(9), max_tokens=12, logprobs=2, sampling=sampling),
    ]
    with local_pair(plain.path, world.agrees, tree=TreeShape(3, 1, 4), decode_split=(2, 2)) as pair:
        answers = pair.run(asks)
    for ask, answer in zip(asks, answers, strict=True):
        ids = [*ask.token_ids, *answer.ids]
        with torch.inference_mode():
            logits = forward(plain.model, ids, 0, OneRequestKv(plain.model, len(ids)))
        expected = logits.double().log_softmax(-1)[len(ask.token_ids) - 1 : -1]
        for token, row in zip(answer.tokens, expected, strict=True):
            if ask.logprobs is None:
                assert token.logprob is None
                continue
            assert token.logprob is not None
            assert token.logprob.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
            best = row.topk(ask.logprobs)
            assert [token_id for token_id, _ in token.logprob.top] == best.indices.tolist()
            assert [value for _, value in token.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_bias_decides(world: TinyWorld) -> None:
    """A large bias forces a token, a large negative one forbids it; only for its own request."""
    usual = world.plain.answer(prompt(6), 8)
    with local_pair(world.plain.path, world.eagle, decode_split=(2, 2)) as pair:
        forced, forbidden, plain = pair.run(
            [
                Ask(token_ids=prompt(6), max_tokens=8, sampling=Sampling(logit_bias={9: 1e4})),
                Ask(token_ids=prompt(6), max_tokens=8, sampling=Sampling(logit_bias={usual[0]: -1e4})),
                Ask(token_ids=prompt(6), max_tokens=8),
            ]
        )
    assert forced.ids == [9] * 8
    assert usual[0] not in forbidden.ids
    assert plain.ids == usual


@pytest.mark.parametrize(("speculates", "early"), [(True, False), (True, True), (False, False)])
def test_a_request_without_finite_logits_fails_alone(
    world: TinyWorld, tmp_path: Path, speculates: bool, early: bool
) -> None:
    """CASES I12: token 200 is poison; whoever reads it fails, at the prompt or later, and is never cached."""
    model = tmp_path / "model"
    model.mkdir()
    for file in world.markov.path.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][200] = torch.nan
    save_file(weights, model / "model.safetensors")
    head = world.agrees if speculates else None
    into_poison = Sampling(logit_bias={200: 1e4})
    with local_pair(
        model,
        head,
        tree=TreeShape(3, 1, 4) if head else None,
        prefill_split=(2, 2),
        decode_split=(2, 2),
        prefill={"launch_drafts_early": early},
    ) as pair:
        good = Ask(token_ids=[3, 4, 5, 6, 7], max_tokens=9)
        later = Ask(token_ids=[3, 4, 5, 6, 8], max_tokens=9, sampling=into_poison)
        answers = pair.run([good, Ask(token_ids=[3, 4, 200], max_tokens=9), later, good])
        again = pair.run([Ask(token_ids=[3, 4, 200], max_tokens=9), good])
    expected = world.markov.answer([3, 4, 5, 6, 7], 9)
    assert 200 not in expected
    assert [answer.end for answer in answers] == [End.FINISHED, End.FAILED, End.FAILED, End.FINISHED]
    assert answers[0].ids == answers[3].ids == again[1].ids == expected
    assert "no finite logit" in str(answers[1].reason)
    assert "no finite logit" in str(answers[2].reason)
    assert (answers[1].ids, answers[2].ids) == ([], [200])
    assert (again[0].end, again[0].cached) == (End.FAILED, [0])


# --- heads that do not fit ------------------------------------------------------------------------------------


def changed_head(world: TinyWorld, path: Path, *, config: dict[str, object], tensors: dict[str, Tensor | None]) -> Path:
    head = write_tiny_head(path, world.plain.path, kind=DraftHeadKind.EAGLE3, draft_vocab=64)
    fields = json.loads((head / CONFIG_FILE).read_text()) | config
    (head / CONFIG_FILE).write_text(json.dumps(fields))
    weights = load_file(head / WEIGHTS_FILE)
    changed = weights | tensors
    weights = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(weights, head / WEIGHTS_FILE)
    return head


def test_heads_that_do_not_fit_are_refused_at_start(world: TinyWorld, tmp_path: Path) -> None:
    """CASES S20, S26: widths and ids are checked when the stage is built, not when a request comes by."""
    far = torch.full((64,), VOCAB_SIZE)
    cases: list[tuple[dict[str, Tensor | None], dict[str, object], str]] = [
        ({"d2t": far}, {}, "d2t leads to ids 259..322 of 259"),
        ({"d2t": -far}, {}, "d2t leads to ids -259"),
        ({"d2t": None}, {}, "without the tensor d2t"),
        ({"d2t": torch.zeros(10)}, {}, "d2t is"),
        ({"fc.weight": torch.zeros(64, 128)}, {}, r"fc.weight is \(64, 128\), the config says \(64, 192\)"),
        ({"midlayer.mlp.up_proj.weight": None}, {}, "has no tensor midlayer.mlp.up_proj.weight"),
        ({}, {"hidden_size": 48}, "the config says"),
        ({}, {"target_hidden_size": 32}, "draft_head"),
        ({}, {"vocab_size": 300}, "draft_head"),
        ({}, {"feature_layers": [1, 2, 9]}, "feature_layers"),
    ]
    for index, (tensors, config, problem) in enumerate(cases):
        head = changed_head(world, tmp_path / str(index), config=config, tensors=tensors)
        with (
            pytest.raises((InvalidRequestError, InternalError), match=problem),
            local_pair(world.plain.path, head, tree=TreeShape(3, 1, 4)),
        ):
            pass


def test_feature_layers_may_come_in_any_order(world: TinyWorld, tmp_path: Path) -> None:
    """The columns of `fc` follow the config's order, across stages: permuting both drafts the same trees."""
    head = write_tiny_head(tmp_path / "a", world.plain.path, kind=DraftHeadKind.EAGLE3)
    columns = load_file(head / WEIGHTS_FILE)["fc.weight"].chunk(3, dim=1)
    order = (2, 0, 1)
    fields = json.loads((head / CONFIG_FILE).read_text())
    layers = fields["feature_layers"]
    other = write_tiny_head(tmp_path / "b", world.plain.path, kind=DraftHeadKind.EAGLE3)
    weights = load_file(other / WEIGHTS_FILE)
    weights["fc.weight"] = torch.cat([columns[index] for index in order], dim=1)
    save_file(weights, other / WEIGHTS_FILE)
    (other / CONFIG_FILE).write_text(json.dumps(fields | {"feature_layers": [layers[index] for index in order]}))
    trees: list[DraftTree] = []

    def keep(tree: DraftTree) -> DraftTree:
        trees.append(tree)
        return tree

    for one in (head, other):
        with local_pair(world.plain.path, one, tree=TreeShape(4, 2, 8), prefill_split=(1, 3)) as pair:
            answer = pair.generate(prompt(9), 4, edit_tree=keep)
            assert answer.ids == world.plain.answer(prompt(9), 4)
    assert trees[0] == trees[1]
