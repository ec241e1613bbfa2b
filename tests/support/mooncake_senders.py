"""Many senders in one process, all making first contact with one peer at the same moment. Run as a script.

A process of its own, because the engine takes a second to go away and this one just ends.
"""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.mooncake_engine import MooncakeConfig
from graftline.kv_transfer.mooncake_transport import MooncakeTransport


def send_from_many(session_id: str, address: int, num_senders: int, num_bytes: int, host: str = "127.0.0.1") -> None:
    """Sender `i`, on `host`, fills its part of the peer's region, `num_bytes` long, with the byte `i + 1`."""
    command = [sys.executable, __file__, session_id, host, *map(str, (address, num_senders, num_bytes))]
    subprocess.run(command, check=True, timeout=60, stderr=subprocess.DEVNULL)


def main() -> None:
    session_id, host = sys.argv[1:3]
    address, num_senders, num_bytes = map(int, sys.argv[3:])
    memory = [np.full(num_bytes, index + 1, dtype=np.uint8) for index in range(num_senders)]
    transports = [MooncakeTransport(MooncakeConfig(host)) for _ in memory]
    for transport, array in zip(transports, memory, strict=True):
        transport.register(array.ctypes.data, num_bytes)
    start = threading.Barrier(num_senders)

    def send(index: int) -> None:
        start.wait(20)
        copy = Copy(memory[index].ctypes.data, address + index * num_bytes, num_bytes)
        transports[index].write(session_id, [copy], time.monotonic() + 30)

    with ThreadPoolExecutor(num_senders) as pool:
        list(pool.map(send, range(num_senders)))
    os._exit(0)


if __name__ == "__main__":
    main()
