"""Clusters of this machine for benchmarks: the launcher's, with settings given as text."""

import importlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

from graftline.bench.target import RouterTarget, Target
from graftline.bench.variants import with_settings


class LocalClusters:
    """See `contestants.Clusters`.

    Args:
        model: known name, directory or GGUF file.
        settings: of every cluster; a variant's own settings go over them.
    """

    def __init__(self, model: str, settings: Mapping[str, str]) -> None:
        self._launcher: Any = importlib.import_module("graftline.launcher")
        self._base = with_settings(self._launcher.ClusterSpec(model=model), settings, "cluster.")

    def check(self, settings: Mapping[str, str], where: str) -> dict[str, str]:
        """See `Clusters`."""
        spec = with_settings(self._base, settings, where)
        return {field.name: str(getattr(spec, field.name)) for field in fields(spec)}

    @asynccontextmanager
    async def open(self, settings: Mapping[str, str]) -> AsyncIterator[Target]:
        """See `Clusters`."""
        spec = with_settings(self._base, settings)
        async with self._launcher.local_cluster(spec) as cluster, RouterTarget(cluster.router_address) as target:
            yield target
