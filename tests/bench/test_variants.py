"""Variants from text, and settings laid over a frozen dataclass."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from graftline.bench.baseline_protocol import BaselineDtype, BaselineKind
from graftline.bench.variants import (
    STANDARD_VARIANTS,
    Variant,
    VariantKind,
    baseline_settings,
    check_names,
    parse_settings,
    parse_variant,
    read_variants,
    with_settings,
)
from graftline.errors import InvalidRequestError


class Tree(Enum):
    REAL = "real"
    ROOT_ONLY = "root-only"


@dataclass(frozen=True, slots=True)
class Draft:
    depth: int = 3
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Spec:
    model: str = "m"
    stages: int = 1
    splits: tuple[int, ...] = ()
    tree: Tree = Tree.REAL
    fraction: float = 0.5
    head: Path | None = None
    draft: Draft = field(default_factory=Draft)
    environment: Mapping[str, str] = field(default_factory=dict)


def test_a_variant_is_a_name_and_settings() -> None:
    assert parse_variant("a=x:1, y:h:2") == Variant("a", {"x": "1", "y": "h:2"})
    assert parse_settings("split:10,12,8,mode:x,y") == {"split": "10,12,8", "mode": "x,y"}
    assert parse_variant("plain") == Variant("plain", {})


@pytest.mark.parametrize("text", ["", "=x:1", "a=x", "a=:1", "a=x:1,:2", "a=x:1,x:2"])
def test_malformed_variants_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="variant"):
        parse_variant(text)


def test_kinds_follow_from_the_settings() -> None:
    kinds = [parse_variant(text).kind for text in ("a=x:1", "b=router:h:1", "c=baseline:transformers")]
    assert kinds == [VariantKind.CLUSTER, VariantKind.ROUTER, VariantKind.BASELINE]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("v.toml", '[variants.a]\nstages = 2\non = true\nsplits = [1, 2]\n[variants.b]\nrouter = "h:1"\n'),
        ("v.json", '{"a": {"stages": 2, "on": true, "splits": [1, 2]}, "b": {"router": "h:1"}}'),
    ],
)
def test_files_hold_variants_in_order(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_variants(path) == [
        Variant("a", {"stages": "2", "on": "true", "splits": "1,2"}),
        Variant("b", {"router": "h:1"}),
    ]


@pytest.mark.parametrize("text", ["a = 1", "variants = 3", "[[["])
def test_files_of_other_things_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "v.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match="variants"):
        read_variants(path)
    with pytest.raises(InvalidRequestError, match="cannot read"):
        read_variants(tmp_path / "none.toml")


def test_settings_take_the_types_of_the_fields() -> None:
    text = (
        "environment.A_B:c,stages:2,splits:10,20,tree:root-only,fraction:0.25,head:/x/y,draft.depth:5,draft.enabled:off"
    )
    assert with_settings(Spec(), parse_settings(text)) == Spec(
        stages=2,
        splits=(10, 20),
        tree=Tree.ROOT_ONLY,
        fraction=0.25,
        head=Path("/x/y"),
        draft=Draft(depth=5, enabled=False),
        environment={"A_B": "c"},
    )
    assert with_settings(Spec(), {}) == Spec()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"stage": "2"}, "v.stage"),
        ({"stages": "two"}, "v.stages"),
        ({"stages": "1.5"}, "v.stages"),
        ({"tree": "dummy"}, "v.tree"),
        ({"draft.width": "1"}, "v.draft.width"),
        ({"model.name": "x"}, "v.model"),
        ({"environment": "x"}, "v.environment"),
    ],
)
def test_settings_that_cannot_be_name_their_field(settings: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        with_settings(Spec(), settings, "v.")
    assert caught.value.field == named


def test_a_baseline_has_its_own_settings_over_the_given_ones() -> None:
    made = baseline_settings(parse_variant("x=baseline:prompt-lookup,dtype:bfloat16,lookup_tokens:7"), "m", 2)
    assert (made.kind, made.dtype, made.lookup_tokens) == (BaselineKind.PROMPT_LOOKUP, BaselineDtype.BFLOAT16, 7)
    assert (made.model, made.threads) == ("m", 2)
    assert baseline_settings(parse_variant("x=baseline:plain-loop,threads:1"), "m", 2).threads == 1


@pytest.mark.parametrize(
    "text", ["x=baseline:magic", "x=baseline:plain-loop,speed:9", "x=baseline:plain-loop,dtype:int3"]
)
def test_a_baseline_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"x\."):
        baseline_settings(parse_variant(text), "m", 1)


def test_names_are_unique() -> None:
    check_names(STANDARD_VARIANTS)
    with pytest.raises(InvalidRequestError, match="'a' is used twice"):
        check_names([Variant("a", {}), Variant("b", {}), Variant("a", {})])
