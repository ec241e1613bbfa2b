"""Results of rounds of fixed shape, from the last stage's rows to what each request hears."""

import torch

from graftline.engine.plan import Segment, StepPlan, decode, encode
from graftline.engine.request import DraftTree
from graftline.engine.round_results import round_outcomes, round_result
from graftline.engine.verify import NO_FINITE_LOGIT
from graftline.kernels.round_open import RoundLayout

LAYOUT = RoundLayout(path_len=3, nodes=4)
# Emitted tokens; length, nodes, accepted nodes, tokens and parents of the next tree.
BOTH = [300, 49151, -1, 12, 3, 0, 2, -1, 49151, 7, 8, 0, -1, 0, 0, 0]
ALONE = [5, -1, -1, 4, 1, 0, -1, -1, 5, 0, 0, 0, -1, 0, 0, 0]
WITHOUT_LOGITS = [6, -1, -1, 4, 1, 0, 1, -1, 0, 0, 0, 0, -1, 0, 0, 0]
PADDING = [-1, -1, -1, 0, 0, -1, -1, -1, 0, 0, 0, 0, -1, 0, 0, 0]


def test_rows_become_outcomes() -> None:
    segments = [Segment(slot, 0, [], None, 0, -1, [], True, carry=True) for slot in (6, 0, 3)]
    plan = StepPlan(9, 1, [], [], segments, False, 4)
    result = round_result(plan, torch.tensor([BOTH, ALONE, WITHOUT_LOGITS, PADDING]))
    sent = decode(encode(result))
    assert sent == result
    assert (result.step, result.microbatch) == (9, 1)
    both, alone, failed = round_outcomes(result, LAYOUT)
    assert (both.slot, both.ids, both.accepted, both.num_nodes, both.error) == (6, [300, 49151], [0, 2], 3, "")
    assert both.tree() == DraftTree((49151, 7, 8), (-1, 0, 0))
    assert (alone.slot, alone.ids, alone.accepted) == (0, [5], [0])
    assert alone.tree() == DraftTree.root_only(5)
    assert (failed.slot, failed.error) == (3, NO_FINITE_LOGIT)
    assert both.logprobs == ()
