"""host:port strings: parsing, and the rule that nobody advertises an address its peers cannot reach."""

import ipaddress

from graftline.errors import InvalidRequestError


def parse_address(address: str, *, field: str = "address") -> tuple[str, int]:
    """Splits `host:port` or `[v6]:port`.

    Raises:
        InvalidRequestError: no host, or no port in [0, 65535].
    """
    host, colon, port = address.strip().rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequestError(field, f"{address!r} is not host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise InvalidRequestError(field, f"{address!r}: write an IPv6 host in brackets")
    return host, int(port)


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
        host, address = advertise, f"{advertise}:{port}"
    if is_wildcard(host):
        raise InvalidRequestError(
            "advertise", f"{host!r} means every interface and cannot be reached by peers; name this host"
        )
    return address
