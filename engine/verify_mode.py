"""What a decode keeps of the nodes of a draft tree whose recurrent state may have to be committed."""

from enum import Enum


class VerifyMode(Enum):
    """SNAPSHOT: the whole state behind every node. REPLAY: the inputs of every node's recurrence, applied again."""

    SNAPSHOT = "snapshot"
    REPLAY = "replay"
