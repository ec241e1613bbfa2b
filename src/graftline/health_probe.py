"""`python -m graftline.health_probe host:port [SERVICE]`: asks a process how it is, as a container's health check.

Exit status 0: it serves. 1: it does not, or does not answer. 2: not a question. Needs no shell, no other program and no
token: health is open to all. TLS: GRAFTLINE_PROBE_CA names the authority, GRAFTLINE_PROBE_CERTIFICATE and
GRAFTLINE_PROBE_KEY the probe's own pair where callers must show one.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from graftline.errors import InvalidRequestError
from graftline.proto.address import parse_address
from graftline.proto.channel import Access, ClientTls, open_sync_channel

TIMEOUT_S = 4.0


def access_from(environment: Mapping[str, str]) -> Access:
    """How the probe identifies itself."""
    names = ("GRAFTLINE_PROBE_CA", "GRAFTLINE_PROBE_CERTIFICATE", "GRAFTLINE_PROBE_KEY")
    authority, certificate, key = (Path(environment[name]) if environment.get(name) else None for name in names)
    return Access() if authority is None else Access(tls=ClientTls(authority, certificate, key))


def probe(address: str, service: str = "", *, access: Access | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """What the process says of a service ("" is the whole server), such as "SERVING", or why it said nothing."""
    with open_sync_channel(address, access or Access()) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs know no methods
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(arguments: Sequence[str]) -> int:
    """Prints the answer; returns the exit status."""
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m graftline.health_probe host:port [SERVICE]", file=sys.stderr)
        return 2
    try:
        parse_address(arguments[0])
    except InvalidRequestError as error:
        print(error, file=sys.stderr)
        return 2
    said = probe(*arguments, access=access_from(os.environ))
    print(said)
    return 0 if said == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
