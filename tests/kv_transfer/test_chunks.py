import pytest

from graftline.kv_transfer.chunks import pages_to_send


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [1, 16, 24, 47])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 23, 24, 25, 47, 48, 49])
def test_every_page_is_sent_once_and_only_when_it_is_final(num_tokens: int, chunk: int, page_size: int) -> None:
    """CASES A12: a page that a middle chunk leaves partly filled goes with a later chunk, once."""
    sent: list[int] = []
    for end in [*range(chunk, num_tokens, chunk), num_tokens]:
        pages = pages_to_send(len(sent), end, page_size, last_chunk=end == num_tokens)
        full = all((page + 1) * page_size <= end for page in pages)
        assert full or end == num_tokens
        sent.extend(pages)
    assert sent == list(range(-(-num_tokens // page_size)))


def test_more_pages_sent_than_computed_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="3 pages sent, 2 pages computed"):
        pages_to_send(3, 40, 16, last_chunk=False)
