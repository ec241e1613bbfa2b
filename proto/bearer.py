"""Bearer tokens as callers show them, in gRPC's metadata and in HTTP's header (RFC 6750, 2.1)."""

import hmac
from collections.abc import Sequence


class BearerTokens:
    """The tokens that are accepted."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._accepted = [token.encode() for token in tokens]

    def __bool__(self) -> bool:
        """Whether a token is wanted at all."""
        return bool(self._accepted)

    def accept(self, authorization: bytes) -> bool:
        """Whether what a caller shows is "Bearer", in any case, and one of them."""
        scheme, _, token = authorization.partition(b" ")
        # Every accepted token is compared, so that the time says nothing about which one matched.
        matches = [hmac.compare_digest(token.strip(), accepted) for accepted in self._accepted]
        return scheme.lower() == b"bearer" and True in matches
