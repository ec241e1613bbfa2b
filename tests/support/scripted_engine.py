"""A stand-in for Mooncake's engine that answers as it is told."""

import itertools
from collections import defaultdict
from collections.abc import Callable


class ScriptedEngine:
    """Answers as told; by default every write is under way at the first look and done at the second."""

    def __init__(self) -> None:
        self.submit: Callable[[str, int], int | None] = lambda target, address: None
        self.refuses: Callable[[str, list[tuple[int, int, int]]], bool] = lambda target, copies: False
        self.status: Callable[[str, int, int], int] = lambda target, address, looks: min(looks, 1)
        self.probe: Callable[[str], int] = lambda session_id: 0
        self.ids = itertools.count(1 << 40)
        self.under_way: dict[int, tuple[str, list[tuple[int, int, int]]]] = {}
        self.arrived: list[tuple[int, int, int]] = []
        self.looks: defaultdict[int, int] = defaultdict(int)
        self.submitted: list[tuple[str, int]] = []
        self.pieces: list[tuple[int, int, int]] = []
        self.batches: list[list[tuple[int, int, int]]] = []
        self.calls: list[list[int]] = []
        self.probes: list[str] = []
        self.unregistered: list[int] = []
        self.most_under_way = 0
        self.register_code = 0

    def get_rpc_port(self) -> int:
        return 15000

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        return self.register_code

    def unregister_memory(self, buffer_addr: int) -> int:
        self.unregistered.append(buffer_addr)
        return 0

    def transfer_submit_write(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int:
        return self._submit(target_hostname, [(buffer, peer_buffer_address, length)])

    def batch_transfer_async_write(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        self.batches.append(list(zip(buffers, peer_buffer_addresses, lengths, strict=True)))
        return self._submit(target_hostname, self.batches[-1])

    def transfer_check_status(self, batch_id: int) -> int:
        assert batch_id in self.under_way, "a batch that never was or has ended: the real engine crashes here"
        looks = self.looks[batch_id]
        self.looks[batch_id] += 1
        target, copies = self.under_way[batch_id]
        status = self.status(target, copies[0][0], looks)
        if status != 0:
            del self.under_way[batch_id]
        if status == 1:
            self.arrived += copies
        return status

    def send_probe(self, peer_server_name: str) -> int:
        self.probes.append(peer_server_name)
        return self.probe(peer_server_name)

    def _submit(self, target: str, copies: list[tuple[int, int, int]]) -> int:
        self.calls.append([address for address, _, _ in copies])
        self.submitted.append((target, copies[0][0]))
        self.pieces.append(copies[0])
        answer = 0 if self.refuses(target, copies) else self.submit(target, copies[0][0])
        if answer is not None:
            return answer
        batch_id = next(self.ids)
        self.under_way[batch_id] = target, copies
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return batch_id
