"""Where the addresses of workers come from: fixed lists, a file that may change, DNS."""

import asyncio
import json
import logging
import socket
import tomllib
from pathlib import Path
from typing import Any, Protocol

from graftline.errors import InvalidRequestError
from graftline.proto.address import parse_peer
from graftline.router.config import WorkerLists

logger = logging.getLogger(__name__)

DNS_PREFIX = "dns:"
RESOLVE_TIMEOUT_S = 1.0


class WorkerSource(Protocol):
    """Says which workers there are, now."""

    async def workers(self) -> WorkerLists:
        """The current lists; never raises for a source that is broken for a while, but repeats its last answer."""


class _Troubles:
    """Logs what is wrong once, and again when it changes or comes back: sources are asked every second."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def say(self, subject: str, problem: str) -> None:
        """Something is wrong with a name or a file."""
        if self._said.get(subject) != problem:
            self._said[subject] = problem
            logger.warning("%s: %s", subject, problem)

    def are_over(self, subject: str) -> None:
        """All is well with it."""
        if self._said.pop(subject, None) is not None:
            logger.info("%s: well again", subject)


class ListSource:
    """Fixed lists. `dns:host:port` stands for every address the name has at the time of asking."""

    def __init__(self, lists: WorkerLists) -> None:
        self._lists = lists
        self._last: dict[str, tuple[str, ...]] = {}
        self._asking: dict[str, asyncio.Future[tuple[str, ...]]] = {}
        self._troubles = _Troubles()

    async def workers(self) -> WorkerLists:
        """See WorkerSource."""
        return WorkerLists(await self._expanded(self._lists.prefill), await self._expanded(self._lists.decode))

    async def _expanded(self, addresses: tuple[str, ...]) -> tuple[str, ...]:
        expanded: list[str] = []
        for address in addresses:
            expanded += await self._resolved(address) if address.startswith(DNS_PREFIX) else (address,)
        return tuple(dict.fromkeys(expanded))

    async def _resolved(self, address: str) -> tuple[str, ...]:
        """A resolver that does not answer holds up nobody for long, and is asked one question at a time."""
        host, port = parse_peer(address.removeprefix(DNS_PREFIX))
        asking = self._asking.get(address)
        if asking is None:
            loop = asyncio.get_running_loop()
            asking = self._asking[address] = loop.run_in_executor(None, _look_up, host, port)
        await asyncio.wait({asking}, timeout=RESOLVE_TIMEOUT_S)
        if not asking.done():
            self._troubles.say(f"the name {host!r}", "no answer yet")
            return self._last.get(address, ())
        del self._asking[address]
        try:
            self._last[address] = asking.result()
            self._troubles.are_over(f"the name {host!r}")
        except (OSError, UnicodeError) as error:  # the latter for what is no name at all
            self._troubles.say(f"the name {host!r}", f"cannot be resolved, its last addresses stay: {error}")
        return self._last.get(address, ())


def _look_up(host: str, port: int) -> tuple[str, ...]:
    """Addresses of a name, with the port; blocks. Raises OSError or UnicodeError when there are none."""
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    hosts = [f"[{info[4][0]}]" if info[0] is socket.AF_INET6 else str(info[4][0]) for info in found]
    return tuple(f"{name}:{port}" for name in sorted(set(hosts)))


class FileSource:
    """A JSON or TOML file (by its suffix) with the lists `prefill` and `decode`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._subject = f"the workers file {path}"
        self._lists = ListSource(WorkerLists())
        self._seen: tuple[int, int, int] | None = None
        self._troubles = _Troubles()

    async def workers(self) -> WorkerLists:
        """See WorkerSource."""
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen != self._seen:
                self._lists = ListSource(read_worker_lists(self._path))
                self._seen = seen
            self._troubles.are_over(self._subject)
        except (OSError, ValueError, InvalidRequestError) as error:
            self._troubles.say(self._subject, f"is not usable, its last lists stay: {error}")
        return await self._lists.workers()


def read_worker_lists(path: Path) -> WorkerLists:
    """Reads a workers file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON or TOML.
        InvalidRequestError: it holds something other than lists of addresses.
    """
    text = path.read_text(encoding="utf-8")
    content: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    if not isinstance(content, dict):
        raise InvalidRequestError(str(path), "is not a table with the lists prefill and decode")
    for name in content.keys() - {"prefill", "decode"}:
        raise InvalidRequestError(name, "is neither prefill nor decode")
    return WorkerLists(_addresses(content, "prefill"), _addresses(content, "decode"))


def _addresses(content: dict[str, Any], role: str) -> tuple[str, ...]:
    addresses = content.get(role, [])
    if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
        raise InvalidRequestError(role, f"{addresses!r} is not a list of addresses")
    for address in addresses:
        parse_peer(address.removeprefix(DNS_PREFIX), field=role)
    return tuple(addresses)
