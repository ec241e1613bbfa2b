"""host:port strings: parsing, and the rule that nobody advertises an address its peers cannot reach."""

import ipaddress
import re

from graftline.errors import InvalidRequestError

_PORT = re.compile("[0-9]{1,5}")
_SPACE = re.compile(r"[\s\x00-\x1f\x7f]")


def parse_address(address: str, *, field: str = "address") -> tuple[str, int]:
    """Splits `host:port` or `[v6]:port`.

    Raises:
        InvalidRequestError: no host, one with spaces, or no port in [0, 65535].
    """
    if "://" in address:
        raise InvalidRequestError(field, f"{address!r} has a scheme; write host:port")
    host, colon, port = address.strip().rpartition(":")
    if not colon or not host or not _PORT.fullmatch(port) or int(port) > 65535 or _SPACE.search(host):
        raise InvalidRequestError(field, f"{address!r} is not host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise InvalidRequestError(field, f"{address!r}: write an IPv6 host in brackets")
    return host, int(port)


def parse_peer(address: str, *, field: str = "address") -> tuple[str, int]:
    """An address that is to be called: as `parse_address`, and port 0 is none."""
    host, port = parse_address(address, field=field)
    if port == 0:
        raise InvalidRequestError(field, f"{address!r}: nobody can be called at port 0")
    return host, port


def is_wildcard(host: str) -> bool:
    """True for hosts that mean "every interface": fine to listen on, useless to connect to."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host in {"*", ""}


def advertised_address(listen: str, port: int, advertise: str | None = None) -> str:
    """The address peers are told.

    Args:
        listen: the address the server listens on.
        port: the port it got (the OS chooses when `listen` says 0).
        advertise: what the operator wants told: `host:port`, or a host alone; by default the listen host.

    Raises:
        InvalidRequestError: the result would be a wildcard, which no peer can reach.
    """
    if advertise is None:
        host, _ = parse_address(listen, field="listen")
        address = f"{host}:{port}"
    elif ":" in advertise.rpartition("]")[2]:
        host, told_port = parse_address(advertise, field="advertise")
        address = f"{host}:{told_port or port}"
    else:
        address = f"{advertise}:{port}"
        host, _ = parse_address(address, field="advertise")
    if is_wildcard(host):
        raise InvalidRequestError(
            "advertise", f"{host!r} means every interface and cannot be reached by peers; name this host"
        )
    return address
