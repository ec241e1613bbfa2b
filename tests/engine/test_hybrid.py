"""Contract 1 for models with recurrent state: output is that of the plain model, however it was split and drafted."""

import pytest
from faulty_port import Fault
from hybrid_world import MTP, NUM_LAYERS, HybridWorld
from local_pair import PREFILL, Answer, Ask, Call, End, local_pair
from tiny_world import prompt

from graftline.engine.plan import SendOrder, SentPool, StepPlan
from graftline.engine.request import Sampling, TreeOrigin
from graftline.engine.stage_states import StageStates
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape
from graftline.engine.verify_mode import VerifyMode

CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(4, 2, 8)
SEEDED = Sampling(temperature=0.7, seed=11)
NEW_TOKENS = 14
# One stage; every stage with linear layers; a last stage without any, a first one without attention.
SPLITS = ((4,), (1, 3), (3, 1))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> HybridWorld:
    return HybridWorld(tmp_path_factory.mktemp("hybrid"))


def asks(*lengths: int) -> list[Ask]:
    """Greedy and seeded in turn."""
    return [
        Ask(token_ids=prompt(length), max_tokens=NEW_TOKENS, sampling=Sampling() if index % 2 == 0 else SEEDED)
        for index, length in enumerate(lengths)
    ]


def assert_plain(world: HybridWorld, wanted: list[Ask], answers: list[Answer], dtype: str = "float32") -> None:
    plain = world.plain if dtype == "float32" else world.plain_bf16
    for ask, answer in zip(wanted, answers, strict=True):
        assert answer.end is End.FINISHED
        assert answer.ids == plain.answer(ask.token_ids, ask.max_tokens, ask.sampling)


def accepted(answers: list[Answer]) -> int:
    return sum(counts.accepted for answer in answers for counts in answer.speculation)


@pytest.mark.parametrize("mode", VerifyMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("decode_split", [*SPLITS, (1, 2, 1)], ids=str)
@pytest.mark.parametrize("prefill_split", SPLITS[:2], ids=str)
def test_output_is_that_of_the_plain_model(
    world: HybridWorld, prefill_split: tuple[int, ...], decode_split: tuple[int, ...], mode: VerifyMode
) -> None:
    """Every decode split meets every mode with chains and with trees."""
    shape = CHAIN if (len(prefill_split) == 1) is (mode is VerifyMode.SNAPSHOT) else TREE
    with local_pair(
        world.plain.path,
        MTP,
        tree=shape,
        prefill_split=prefill_split,
        decode_split=decode_split,
        decode={"verify_state": mode},
    ) as pair:
        wanted = asks(21, 3, 16, 33)
        answers = pair.run(wanted)
    assert_plain(world, wanted, answers)
    assert all(answer.origins == [TreeOrigin.REAL] for answer in answers)
    assert accepted(answers) > 8, "drafts that never hold commit nothing but roots"


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 4, 5, 7])
def test_chunks_around_the_width_of_the_convolution(world: HybridWorld, chunk_tokens: int) -> None:
    with local_pair(world.plain.path, MTP, tree=CHAIN, prefill_split=(1, 3), chunk_tokens=chunk_tokens) as pair:
        wanted = asks(1, 3, 4, 5, 12)
        answers = pair.run(wanted)
    assert_plain(world, wanted, answers)


def test_without_speculation(world: HybridWorld) -> None:
    with local_pair(world.plain.path, tree=NO_SPECULATION, prefill_split=(1, 3), decode_split=(2, 2)) as pair:
        wanted = asks(9, 17)
        assert_plain(world, wanted, pair.run(wanted))


def test_bfloat16(world: HybridWorld) -> None:
    with local_pair(world.plain.path, MTP, tree=TREE, decode_split=(1, 3), dtype="bfloat16") as pair:
        wanted = asks(18, 6)
        assert_plain(world, wanted, pair.run(wanted), "bfloat16")


@pytest.fixture(params=[0, 2])
def forgetful_stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The stage whose first layer is this one never commits."""
    begin = StageStates.begin

    def forget(self: StageStates, plan: StepPlan) -> None:
        if self.verify is not None and self.pool.geometry.layers[0] == request.param:
            plan = StepPlan(plan.step, plan.microbatch, plan.openings, plan.pages, [], plan.early_tokens)
        begin(self, plan)

    monkeypatch.setattr(StageStates, "begin", forget)
    return int(request.param)


def test_a_stage_that_does_not_commit_is_noticed(world: HybridWorld, forgetful_stage: int) -> None:
    """Fault injection: were commits of an earlier stage not needed, the parity above would show nothing."""
    assert forgetful_stage < NUM_LAYERS
    with local_pair(world.plain.path, MTP, tree=CHAIN, decode_split=(2, 2)) as pair:
        wanted = asks(21, 16, 33)
        answers = pair.run(wanted)
    expected = [world.plain.answer(ask.token_ids, NEW_TOKENS, ask.sampling) for ask in wanted]
    assert [answer.ids for answer in answers] != expected


def test_pools_are_what_was_planned(world: HybridWorld) -> None:
    """Contract 8: to the byte, on both sides; a prefill has no verify state (CASES S40)."""
    with local_pair(world.plain.path, MTP, tree=CHAIN, prefill_split=(1, 3), decode_split=(3, 1)) as pair:
        for engine in (pair.prefill_engine, pair.decode_engine):
            memory = engine.facts.memory
            assert memory is not None
            verify = [stage.verify_state_bytes for stage in memory.stages]
            if engine is pair.prefill_engine:
                assert (verify, memory.skips_verify) == ([0, 0], True)
                assert all(memory.skipped_stage_bytes)
            else:
                assert verify[0] > 0, "linear layers on the first stage"
                assert verify[1] == 0, "none on the last"
                assert memory.skipped_bytes == 0
        pair.run(asks(5))


@pytest.mark.parametrize("drained", [True, False])
def test_a_lost_state_fails_its_request_and_its_slot_waits(world: HybridWorld, drained: bool) -> None:
    """Contract 7 for slots: late bytes of a failed write can reach nobody else's state."""
    faults = [Fault("connection reset", drained)]

    def rule(order: SendOrder, stage: int) -> Fault | None:
        return faults.pop() if faults and order.pool is SentPool.STATE else None

    with local_pair(world.plain.path, MTP, tree=CHAIN, decode={"max_running": 2}, quiescent=False) as pair:
        pair.network.rule = rule
        failed = pair.generate(prompt(9), 6)
        assert failed.end is End.FAILED
        assert "connection reset" in str(failed.reason)
        pair.await_load(lambda: pair.decode.load().slots_free == (2 if drained else 1))
        wanted = asks(11, 4, 8)
        assert_plain(world, wanted, pair.run(wanted))
        assert pair.decode.load().slots_free == (2 if drained else 1)
        pair.decode.forget_peer(PREFILL)
        pair.await_load(lambda: pair.decode.load().slots_free == 2)
        pair.assert_quiescent()


def test_cancels_leave_slots_clean(world: HybridWorld) -> None:
    """Requests cancelled at every stage of their lives, then the same slots for others."""

    def at(count: int) -> Ask:
        def hook(call: Call, event: object) -> None:
            if len(call.answer.events) == count:
                call.cancel()

        return Ask(token_ids=prompt(20, count), max_tokens=30, on_event=hook)

    with local_pair(
        world.plain.path,
        MTP,
        tree=TREE,
        prefill_split=(1, 3),
        decode_split=(3, 1),
        chunk_tokens=5,
        num_pages=128,
        decode={"max_running": 2},
    ) as pair:
        cancelled = pair.run([at(count) for count in range(1, 8)], concurrency=4)
        wanted = asks(7, 19, 12, 5)
        assert_plain(world, wanted, pair.run(wanted))
    assert {answer.end for answer in cancelled} == {End.CANCELLED}


@pytest.mark.parametrize("mode", VerifyMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize(("decode_split", "preempt_every"), [((1, 3), 7), ((3, 1), 2)], ids=str)
def test_preempted_requests_find_their_state_again(
    world: HybridWorld, decode_split: tuple[int, ...], preempt_every: int, mode: VerifyMode
) -> None:
    """CASES S52: it is handed over anew with prompt and output so far, into whichever of the few slots is free."""
    with local_pair(
        world.plain.path,
        MTP,
        tree=TREE,
        prefill_split=(1, 3),
        decode_split=decode_split,
        chunk_tokens=5,
        num_pages=128,
        prefill={"max_running": 2},
        decode={"preempt_every": preempt_every, "verify_state": mode, "max_running": 3},
    ) as pair:
        wanted = asks(*(5 + 4 * index for index in range(8)), 40, 2)
        answers = pair.run(wanted, concurrency=8)
        assert pair.decode.totals.preemptions > 2
    assert_plain(world, wanted, answers)
    assert max(answer.num_attempts for answer in answers) > 1, "nobody was preempted"
