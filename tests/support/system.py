"""Router, one prefill and one decode as real services over gRPC and Mooncake, in one process (stages are threads)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from graftline.client import AsyncClient, Choice
from graftline.decode_server.server import Decode, DecodeConfig, running_decode
from graftline.decode_server.settings import ServiceSettings
from graftline.engine.config import EngineConfig, Role, StageMode
from graftline.engine.request import Sampling
from graftline.engine.tree_shape import TreeShape
from graftline.kv_transfer.in_process import InProcessHub
from graftline.prefill_server.server import Prefill, PrefillConfig, running_prefill
from graftline.router.config import HealthConfig, RouterConfig, WorkerLists
from graftline.router.server import Router, running_router
from graftline.worker.config import TransferConfig, TransportName, WorkerConfig

# A crowded machine must not look like a hung peer: what is tested here is not how fast hangs are noticed.
PATIENT = ServiceSettings(pair_timeout_s=30.0, peer_silence_s=30.0)


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """What to run."""

    model: Path
    head: Path | None
    tree: TreeShape
    prefill_split: tuple[int, ...] = (4,)
    decode_split: tuple[int, ...] = (4,)
    page_size: int = 16
    num_tokens: int = 2048
    chunk_tokens: int = 16
    max_running: int = 8
    dtype: str = "float32"
    transport: TransportName = TransportName.MOONCAKE
    real_trees: bool = True
    prefix_cache: bool = True
    preempt_every: int = 0
    transfer_faults: str = ""
    kv_digest: bool = False

    def engine(self, role: Role, split: tuple[int, ...]) -> EngineConfig:
        """Configuration of one worker's engine."""
        return EngineConfig(
            model=str(self.model),
            role=role,
            draft_head=str(self.head) if self.head is not None else None,
            dtype=self.dtype,
            layer_split=split,
            stage_mode=StageMode.THREADS,
            page_size=self.page_size,
            num_pages=self.num_tokens // self.page_size,
            max_running=self.max_running,
            chunk_tokens=self.chunk_tokens,
            tree=self.tree,
            real_trees=self.real_trees,
            prefix_cache=self.prefix_cache,
            preempt_every=self.preempt_every if role is Role.DECODE else 0,
        )


@dataclass(frozen=True, slots=True)
class System:
    """A running system."""

    client: AsyncClient
    router: Router
    prefill: Prefill
    decode: Decode

    async def answer(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling | None = None, *, ignore_eos: bool = True
    ) -> Choice:
        """One request's only choice."""
        drawn = sampling or Sampling()
        completion = await self.client.complete(
            list(prompt),
            max_tokens=max_tokens,
            temperature=drawn.temperature,
            top_k=drawn.top_k,
            top_p=drawn.top_p,
            min_p=drawn.min_p,
            seed=drawn.seed,
            ignore_eos=ignore_eos,
            timeout_s=120,
        )
        (choice,) = completion.choices
        return choice

    async def cancel_after(self, prompt: Sequence[int], num_deltas: int) -> int:
        """Starts a long request and leaves it after so many deltas; how many tokens came."""
        count = 0
        async with aclosing(
            self.client.generate(list(prompt), max_tokens=400, temperature=0.0, ignore_eos=True, timeout_s=120)
        ) as deltas:
            async for delta in deltas:
                count += len(delta.token_ids)
                num_deltas -= 1
                if num_deltas <= 0:
                    break
        return count

    async def assert_quiescent(self) -> None:
        """Waits until nothing is open, then asserts that every pool is whole."""
        async with asyncio.timeout(20):
            await self.prefill.service.wait_idle()
            await self.decode.service.wait_idle()
        await asyncio.to_thread(self._check_engines)

    def _check_engines(self) -> None:
        for scheduler in (self.prefill.engine.scheduler, self.decode.engine.scheduler):
            scheduler.check_quiescent()


async def limited(jobs: Sequence[Awaitable[Choice]], concurrency: int) -> list[Choice]:
    """Results in order, at most so many jobs at once."""
    gate = asyncio.Semaphore(concurrency)

    async def run(job: Awaitable[Choice]) -> Choice:
        async with gate:
            return await job

    return list(await asyncio.gather(*(run(job) for job in jobs)))


@asynccontextmanager
async def running_system(spec: SystemSpec) -> AsyncIterator[System]:
    """Runs everything; ends with the check that nothing was leaked."""
    hub = InProcessHub()
    transfer = TransferConfig(transport=spec.transport, faults=spec.transfer_faults, kv_digest=spec.kv_digest)
    worker = WorkerConfig(transfer=transfer, drain_grace_s=5.0)
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            running_prefill(PrefillConfig(spec.engine(Role.PREFILL, spec.prefill_split), worker, hub=hub))
        )
        decode = await stack.enter_async_context(
            running_decode(DecodeConfig(spec.engine(Role.DECODE, spec.decode_split), worker, PATIENT, hub))
        )
        lists = WorkerLists(prefill=(prefill.address,), decode=(decode.address,))
        health = HealthConfig(hang_timeout_s=30.0, stall_timeout_s=30.0)
        router = await stack.enter_async_context(
            running_router(RouterConfig(workers=lists, health=health, drain_grace_s=5.0))
        )
        await router.wait_until_usable(30)
        client = await stack.enter_async_context(AsyncClient(router.address))
        system = System(client, router, prefill, decode)
        yield system
        await system.assert_quiescent()
