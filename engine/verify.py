"""Which drafts hold: the walk from the root along the tokens that were sampled.

Every node's sample is what the target itself would emit behind that node's path, because sampling is a pure
function of (logits, parameters, seed, position). A child is accepted exactly when its token equals its parent's
sample, so the emitted tokens are those of decoding without drafts.
"""

from collections.abc import Sequence

NO_FINITE_LOGIT = "the model gave no finite logit for this request"


def accepted_path(tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Nodes from the root on whose tokens were sampled at their parents.

    Args:
        tokens: [nodes] drafted tokens, the root's included.
        parents: [nodes] with parents[0] == -1 and parents[i] < i.
        sampled: [nodes] token sampled at every node.

    Returns:
        Accepted nodes, ascending, the root first. The emitted tokens are `sampled` at these nodes.
    """
    path = [0]
    for node in range(1, len(tokens)):
        if parents[node] == path[-1] and tokens[node] == sampled[path[-1]]:
            path.append(node)
    return path
