"""Which prompts the tokens of one prefill step go to.

First come, first served lets one long prompt hold back every short one behind it for as many steps as it has chunks.
Shortest first alone may let a long one wait for ever. So up to half of a step goes to prompts that are shorter than
what is left of the oldest one; prompts of one length are served in order.
"""

from collections.abc import Sequence


def share_chunk(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens of every prompt in the next step.

    Args:
        remaining: tokens that each prompt still needs, the oldest first; none is 0.
        budget: tokens of the step, at least 1.

    Returns:
        A number for every prompt, 0 for those that wait. Together they use the budget as far as there is need, and the
        oldest prompt gets at least half of it (rounded up), if it needs so much.
    """
    if not remaining:
        return []
    shares = [0] * len(remaining)
    by_length = sorted(range(len(remaining)), key=lambda index: remaining[index])

    def give(indices: Sequence[int], tokens: int) -> int:
        for index in indices:
            taken = min(remaining[index] - shares[index], tokens)
            shares[index] += taken
            tokens -= taken
        return tokens

    for_shorter = budget // 2
    unused = give([index for index in by_length if remaining[index] < remaining[0]], for_shorter)
    give((0, *by_length), budget - for_shorter + unused)
    return shares
