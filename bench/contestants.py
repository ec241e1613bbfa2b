"""Makes contestants of variants: clusters of their own, routers that run already, and baselines."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from graftline.bench.baselines import running_baseline
from graftline.bench.compare import Contestant
from graftline.bench.records import VariantFacts
from graftline.bench.target import RouterTarget, Target
from graftline.bench.variants import Variant, VariantKind, baseline_settings
from graftline.engine.model_fetch import resolve_model
from graftline.errors import InvalidRequestError
from graftline.proto.address import parse_address
from graftline.proto.channel import ANONYMOUS, Access


class Clusters(Protocol):
    """Starts clusters; the one for this machine is `graftline.bench.cluster.LocalClusters`."""

    def check(self, settings: Mapping[str, str], where: str) -> dict[str, str]:
        """Every setting that a cluster with these would run with, as text.

        Raises:
            InvalidRequestError: an unknown setting or a bad value; `where` is put before its name.
        """

    def open(self, name: str, settings: Mapping[str, str]) -> AbstractAsyncContextManager[Target]:
        """Starts a cluster, waits until it serves, and ends it. `name` tells its logs from other clusters'."""


class NoClusters:
    """For benchmarks that start none."""

    def check(self, settings: Mapping[str, str], where: str) -> dict[str, str]:
        """Refuses. See `Clusters`."""
        raise InvalidRequestError(f"{where}cluster", "no cluster can be started here")

    def open(self, name: str, settings: Mapping[str, str]) -> AbstractAsyncContextManager[Target]:
        """Refuses. See `Clusters`."""
        raise InvalidRequestError("cluster", "no cluster can be started here")


def make_contestants(
    variants: Sequence[Variant],
    clusters: Clusters,
    *,
    model: str,
    baseline_threads: int,
    access: Access = ANONYMOUS,
) -> tuple[list[Contestant], list[VariantFacts]]:
    """Contestants in the order of `variants`, and what a result says about them. Starts nothing.

    Args:
        model: what baselines load: a known name, a directory or a GGUF file.
        baseline_threads: threads of each baseline that does not say; 0: as many as there are cores.
        access: for routers that run already.

    Raises:
        InvalidRequestError: a setting that cannot be, or a model that is not there.
        ModelFetchError: see `resolve_model`.
    """
    contestants, facts = [], []
    for variant in variants:
        contestant, settings = _make(variant, clusters, model, baseline_threads, access)
        contestants.append(contestant)
        facts.append(VariantFacts(variant.name, variant.kind.value, settings))
    return contestants, facts


def _make(
    variant: Variant, clusters: Clusters, model: str, baseline_threads: int, access: Access
) -> tuple[Contestant, dict[str, str]]:
    match variant.kind:
        case VariantKind.ROUTER:
            given = dict(variant.settings)
            address, asked_model = given.pop("router"), given.pop("model", "")
            if given:
                raise InvalidRequestError(f"{variant.name}.{next(iter(given))}", "a router takes no further settings")
            parse_address(address, field=f"{variant.name}.router")
            return (
                Contestant(variant.name, lambda: RouterTarget(address, access, asked_model)),
                dict(variant.settings),
            )
        case VariantKind.BASELINE:
            baseline = baseline_settings(
                variant, str(resolve_model(variant.settings.get("model", model))), baseline_threads
            )
            shown = {"baseline": baseline.kind.value, "dtype": baseline.dtype.value, "threads": str(baseline.threads)}
            if "lookup" in baseline.kind.value:
                shown["lookup_tokens"] = str(baseline.lookup_tokens)
            return Contestant(variant.name, lambda: running_baseline(baseline)), shown
        case VariantKind.CLUSTER:
            shown = clusters.check(variant.settings, f"{variant.name}.")
            return Contestant(variant.name, lambda: clusters.open(variant.name, variant.settings)), shown
