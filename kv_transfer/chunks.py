"""Which pages a prefill chunk may send: arithmetic only.

A page that a middle chunk leaves partly filled waits for a later chunk, so that every page travels exactly once.
"""


def pages_to_send(sent_pages: int, num_tokens: int, page_size: int, last_chunk: bool) -> range:
    """Page indices (positions in the request's page table, not page ids) that become ready with a chunk.

    Args:
        sent_pages: pages that earlier chunks of the request have sent already.
        num_tokens: tokens of the request whose KV is computed, this chunk included.
        page_size: tokens a page.
        last_chunk: send the partly filled page as well.
    """
    assert page_size > 0
    assert sent_pages >= 0
    full, rest = divmod(num_tokens, page_size)
    end = full + (1 if last_chunk and rest else 0)
    assert sent_pages <= end, f"{sent_pages} pages sent, {end} pages computed"
    return range(sent_pages, end)
