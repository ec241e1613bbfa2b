"""A real Mooncake peer in a process of its own. Run as a script it is that process."""

import hashlib
import json
import subprocess
import sys
from typing import Any

import numpy as np

from graftline.kv_transfer.mooncake_engine import MooncakeConfig
from graftline.kv_transfer.mooncake_transport import MooncakeTransport


class MooncakePeer:
    """A process with a registered region of zeros that others may write to."""

    def __init__(self, num_bytes: int, **config: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(num_bytes), json.dumps({"host": "127.0.0.1", **config})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        hello = self._read()
        self.session_id: str = hello["session_id"]
        self.address: int = hello["address"]
        self.num_bytes = num_bytes

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait()}"
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def ask(self, **command: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._read()

    def digest(self, offset: int, num_bytes: int) -> str:
        """SHA-256 of a part of the region, as the peer sees it."""
        answer: str = self.ask(offset=offset, num_bytes=num_bytes)["digest"]
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    num_bytes, config = int(sys.argv[1]), json.loads(sys.argv[2])
    memory = np.zeros(num_bytes, dtype=np.uint8)
    transport = MooncakeTransport(MooncakeConfig(**config))
    transport.register(memory.ctypes.data, num_bytes)
    answer({"session_id": transport.session_id, "address": memory.ctypes.data})
    for line in sys.stdin:
        command = json.loads(line)
        part = memory[command["offset"] : command["offset"] + command["num_bytes"]]
        answer({"digest": hashlib.sha256(part.tobytes()).hexdigest(), "sum": int(part.sum(dtype=np.int64))})


def answer(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
