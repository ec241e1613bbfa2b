"""Which contents count."""

from pathlib import Path

from graftline.engine.models.content_hash import content_hash

MIB = 1024 * 1024


def test_small_files_count_whole(tmp_path: Path) -> None:
    path = tmp_path / "small"
    content = bytearray(9 * MIB + 5)
    path.write_bytes(content)
    before = content_hash([path], b"")
    assert len(before) == 32
    for position in (0, 4 * MIB - 1, 7 * MIB, len(content) - 1):
        content[position] = 1
        path.write_bytes(content)
        assert content_hash([path], b"") != before
        content[position] = 0
    path.write_bytes(content)
    assert content_hash([path], b"") == before
    assert content_hash([path], b"salt") != before


def test_names_do_not_count_but_order_and_borders_do(tmp_path: Path) -> None:
    one, two, both = (tmp_path / name for name in ("one", "two", "both"))
    one.write_bytes(b"ab")
    two.write_bytes(b"c")
    both.write_bytes(b"abc")
    copy = tmp_path / "copy"
    copy.write_bytes(b"ab")
    assert content_hash([one, two], b"") == content_hash([copy, two], b"")
    assert len({content_hash(files, b"") for files in ([one, two], [two, one], [both])}) == 3


def test_large_files_count_at_their_ends_and_all_over(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(300 * MIB)  # sparse
    seen = {content_hash([path], b"")}
    with path.open("r+b") as file:
        for position in (10, 300 * MIB - 10, 300 * MIB * 1234 // 4096 + 7):
            file.seek(position)
            file.write(b"x")
            file.flush()
            seen.add(content_hash([path], b""))
        file.truncate(300 * MIB + 1)
    seen.add(content_hash([path], b""))
    assert len(seen) == 5
