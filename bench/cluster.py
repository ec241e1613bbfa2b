"""Clusters of this machine for benchmarks: the launcher's, with settings given as text."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from enum import Enum

from graftline.bench.target import RouterTarget, Target
from graftline.bench.variants import with_settings
from graftline.launcher import ClusterSpec, local_cluster
from graftline.proto.channel import Access


class LocalClusters:
    """See `contestants.Clusters`.

    Args:
        model: known name, directory or GGUF file.
        settings: of every cluster, by `ClusterSpec`'s fields; a variant's own settings go over them.

    Raises:
        InvalidRequestError: see `with_settings`.
    """

    def __init__(self, model: str, settings: Mapping[str, str]) -> None:
        self._base = with_settings(ClusterSpec(model=model), settings, "cluster.")

    def check(self, settings: Mapping[str, str], where: str) -> dict[str, str]:
        """What differs from `ClusterSpec`'s defaults, and how much of the machine it uses. See `Clusters`."""
        spec, defaults = with_settings(self._base, settings, where), ClusterSpec()
        shown = {
            field.name: _as_text(getattr(spec, field.name))
            for field in fields(spec)
            if getattr(spec, field.name) != getattr(defaults, field.name) or field.name in settings
        }
        return {**shown, "stages_in_all": str(spec.num_stages), "threads_in_all": str(_threads(spec))}

    @asynccontextmanager
    async def open(self, name: str, settings: Mapping[str, str]) -> AsyncIterator[Target]:
        """See `Clusters`."""
        spec = with_settings(self._base, settings)
        if spec.log_dir is not None:
            spec = replace(spec, log_dir=spec.log_dir / name)
        access = Access(spec.token or None)
        async with local_cluster(spec) as cluster, RouterTarget(cluster.router_address, access) as target:
            yield target


def _threads(spec: ClusterSpec) -> int:
    """Threads that compute, over all stages of all workers."""
    return spec.num_stages * spec.engine_options(spec.decode_stages, spec.decode_split).threads


def _as_text(value: object) -> str:
    return str(value.value if isinstance(value, Enum) else value)
