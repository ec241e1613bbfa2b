"""Whether a worker on a CPU can keep its promise of exact output: found out before it serves anybody."""

import logging
import os

from graftline.errors import InvalidRequestError
from graftline.kernels.native_library import ENVIRONMENT, NativeBuildError, native_library

logger = logging.getLogger(__name__)


def check_exact_kernels() -> None:
    """Looks for the C library, without which a token's bits depend on what it is computed with.

    Raises:
        InvalidRequestError: there is none, and nobody said that it should do without.
    """
    if os.environ.get(ENVIRONMENT) == "none":
        logger.warning("%s=none: slow, and output may differ from that of the plain model", ENVIRONMENT)
        return
    try:
        library = native_library()
    except (NativeBuildError, OSError) as error:
        raise InvalidRequestError(ENVIRONMENT, str(error)) from error
    if library is None:
        raise InvalidRequestError(
            ENVIRONMENT,
            "there are no native kernels (the log says why), and without them output may differ from that of the plain "
            "model; install gcc, or name a library that python -m graftline.kernels.native_library OUT.so x86-64-v3 "
            "built elsewhere, or say none to serve nevertheless",
        )
