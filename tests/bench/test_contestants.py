"""What a variant becomes, without starting anything."""

from pathlib import Path

import pytest

from graftline.bench.cluster import LocalClusters
from graftline.bench.contestants import NoClusters, make_contestants
from graftline.bench.variants import STANDARD_VARIANTS, Variant, parse_variant
from graftline.engine.models.random import write_tiny_model
from graftline.errors import InvalidRequestError
from graftline.launcher import ClusterSpec


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_tiny_model(tmp_path / "tiny", layers=1))


def test_the_standard_variants_can_all_be_made(model: str) -> None:
    clusters = LocalClusters(model, {"decode_stages": "2", "threads": "1"})
    contestants, facts = make_contestants(STANDARD_VARIANTS, clusters, model=model, baseline_threads=3)
    assert [contestant.name for contestant in contestants] == [variant.name for variant in STANDARD_VARIANTS]
    by_name = {entry.name: entry for entry in facts}
    assert by_name["real"].kind == "cluster"
    assert by_name["real"].settings["initial_tree"] == "real"
    assert by_name["real"].settings["threads_in_all"] == "3"
    assert by_name["no-speculation"].settings["speculation"] == "False"
    assert by_name["lookup-bfloat16"].settings == {
        "baseline": "prompt-lookup",
        "dtype": "bfloat16",
        "threads": "3",
        "lookup_tokens": "3",
    }
    assert by_name["transformers-float32"].settings["dtype"] == "float32"


def test_cluster_settings_go_under_a_variants_own(model: str) -> None:
    clusters = LocalClusters(model, {"decode_stages": "2", "dtype": "float32"})
    shown = clusters.check({"decode_stages": "3", "prefill_split": "1"}, "v.")
    assert shown["decode_stages"] == "3"
    assert shown["dtype"] == "float32"
    assert shown["prefill_split"] == "1"
    assert shown["model"] == model
    assert shown["stages_in_all"] == "4"
    assert "page_size" not in shown, "defaults are left out"


def test_every_field_of_a_cluster_can_be_set_to_its_default_as_text(model: str) -> None:
    defaults = ClusterSpec()
    texts = {
        "prefills": "1",
        "speculation": "on",
        "stage_mode": defaults.stage_mode.value,
        "transport": defaults.transport.value,
        "memory_mib": str(defaults.memory_mib),
        "stage_timeout_s": str(defaults.stage_timeout_s),
        "environment.A": "b",
    }
    shown = LocalClusters(model, {}).check(texts, "v.")
    assert shown["environment"] == "{'A': 'b'}"
    assert shown["transport"] == defaults.transport.value


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"tree": "real"}, "v.tree"), ({"prefills": "x"}, "v.prefills"), ({"prefills": "0"}, "prefills")],
)
def test_cluster_settings_that_cannot_be_are_refused(model: str, settings: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        LocalClusters(model, {}).check(settings, "v.")
    assert caught.value.field == field


def test_routers_and_baselines_need_no_clusters(model: str) -> None:
    variants = [parse_variant("r=router:h:1,model:m"), parse_variant(f"b=baseline:plain-loop,model:{model}")]
    _, facts = make_contestants(variants, NoClusters(), model="unused", baseline_threads=1)
    assert facts[0].settings == {"router": "h:1", "model": "m"}
    assert facts[1].settings["baseline"] == "plain-loop"
    with pytest.raises(InvalidRequestError, match="no cluster"):
        make_contestants([Variant("c", {})], NoClusters(), model=model, baseline_threads=1)
    with pytest.raises(InvalidRequestError, match="no cluster"):
        NoClusters().open("c", {})


def test_a_baseline_of_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="model"):
        make_contestants([parse_variant("b=baseline:plain-loop")], NoClusters(), model="/nowhere", baseline_threads=1)
