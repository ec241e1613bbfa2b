"""Prompt files, the shipped one included."""

import hashlib
from pathlib import Path

import pytest

from graftline.bench.prompt_set import DEFAULT_PROMPTS, ChatMessage, Prompt, read_prompts
from graftline.errors import InvalidRequestError


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_three_forms_and_their_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        '{"id": "a", "kind": "chat", "messages": [{"role": "user", "content": "hi"}], "licence": "any"}',
        "",
        '{"text": "once"}',
        '{"token_ids": [1, 2]}',
    )
    found = read_prompts(path)
    assert found.prompts == (
        Prompt("a", "chat", messages=(ChatMessage("user", "hi"),)),
        Prompt("line-3", "any", text="once"),
        Prompt("line-4", "any", token_ids=(1, 2)),
    )
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_kinds_take_turns_and_can_be_chosen(tmp_path: Path) -> None:
    lines = [f'{{"id": "{kind}{number}", "kind": "{kind}", "text": "t"}}' for kind in "abc" for number in range(2)]
    path = write(tmp_path / "p.jsonl", *lines)
    assert [prompt.id for prompt in read_prompts(path).prompts] == ["a0", "b0", "c0", "a1", "b1", "c1"]
    assert [prompt.id for prompt in read_prompts(path, ["c", "a"]).prompts] == ["c0", "a0", "c1", "a1"]
    with pytest.raises(InvalidRequestError, match=r"'d' is not in .* holds a, b, c"):
        read_prompts(path, ["d"])


def test_a_slice_goes_round(tmp_path: Path) -> None:
    found = read_prompts(write(tmp_path / "p.jsonl", *(f'{{"text": "{number}"}}' for number in range(3))))
    assert [prompt.text for prompt in found.slice(2, 4)] == ["2", "0", "1", "2"]
    assert [prompt.text for prompt in found.slice(-2, 2)] == ["1", "2"]


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"text": "a", "token_ids": [1]}', '{"text": 3}', '{"messages": [{"role": "user"}]}']
)
def test_lines_that_are_no_prompt_are_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "p.jsonl", '{"text": "fine"}', line)
    with pytest.raises(InvalidRequestError, match=r"p\.jsonl:2"):
        read_prompts(path)


def test_no_file_and_no_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot read"):
        read_prompts(tmp_path / "none")
    with pytest.raises(InvalidRequestError, match="no prompts"):
        read_prompts(write(tmp_path / "empty", ""))


def test_the_shipped_prompts_are_there() -> None:
    found = read_prompts(DEFAULT_PROMPTS)
    assert set(found.kinds) == {"chat", "code", "tools", "arithmetic"}
    assert {prompt.kind for prompt in found.slice(0, 4)} == set(found.kinds)
