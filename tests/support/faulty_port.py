"""Faults between the stages of one process: sends that fail by rule, writes that hang in the middle."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graftline.engine.plan import SendDone, SendOrder
from graftline.engine.transfer_port import Sending, StagePools, TransferPort
from graftline.kv_transfer.device_copy import copy_any_memory
from graftline.kv_transfer.in_process import InProcessHub
from graftline.worker.config import TransferConfig, TransportName
from graftline.worker.transfer import PortFactory


@dataclass(frozen=True, slots=True)
class Fault:
    """How a send fails. With `drained` false the bytes may still land."""

    error: str
    drained: bool = True


def no_fault(order: SendOrder, stage: int) -> Fault | None:
    """The rule of a network on which nothing goes wrong."""
    return None


class Network:
    """In-process transfers between workers, and what goes wrong with them. Thread-safe.

    Attributes:
        rule: asked before every send: whether, and how, it fails.
        pools: pools of every stage that opened a port, in order of opening.
    """

    def __init__(self) -> None:
        self.rule: Callable[[SendOrder, int], Fault | None] = no_fault
        self.pools: list[StagePools] = []
        self._hub = InProcessHub(self._copy)
        self._open = threading.Event()
        self._open.set()
        self._held = threading.Semaphore(0)

    def ports(self) -> Callable[[int], TransferPort]:
        """Makes the ports of one worker's stages."""
        factory = PortFactory(TransferConfig(transport=TransportName.IN_PROCESS), self._hub)
        return lambda stage: FaultyPort(self, stage, factory(stage))

    def hold(self) -> None:
        """Writes that begin from now on hang in the middle, where no cancel reaches them."""
        self._open.clear()

    def let_go(self) -> None:
        """Writes that hang complete."""
        self._open.set()

    def await_held(self, timeout_s: float = 30.0) -> None:
        """Until one more write hangs."""
        assert self._held.acquire(timeout=timeout_s), "no write began"

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        if not self._open.is_set():
            self._held.release()
        assert self._open.wait(60), "a held write was never let go"
        (copy_any_memory if torch.cuda.is_available() else ctypes.memmove)(target, source, num_bytes)


class FaultyPort:
    """A stage's real port, but for the sends that the network's rule fails."""

    def __init__(self, network: Network, stage: int, port: TransferPort) -> None:
        self._network = network
        self._stage = stage
        self._port = port
        self.pair = port.pair
        self.forget = port.forget
        self.cancel = port.cancel
        self.close = port.close

    def open(self, pools: StagePools) -> bytes:
        self._network.pools.append(pools)
        return self._port.open(pools)

    def send(self, sendings: Sequence[Sending]) -> None:
        whole: list[Sending] = []
        for sending in sendings:
            order = sending.order
            fault = self._network.rule(order, self._stage)
            if fault is None:
                whole.append(sending)
            else:
                failed = SendDone(order.order, self._stage, 0, 0.0, fault.error, fault.drained)
                threading.Thread(target=sending.done, args=(failed,)).start()
        self._port.send(whole)
