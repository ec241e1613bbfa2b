"""Measures recurrent state and verify state on a GPU, at the dimensions of Qwen3-Next-80B-A3B, without its weights.

`python -m graftline.bench.hybrid_gpu --out results/hybrid_gpu.json` answers two questions: do the pools of both roles
take what the plan says (beside the driver's own figure); what does replay cost and save against snapshots, bit for bit.
Needs one GPU with 120 GB free, for a minute or two.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from graftline.engine.config import MTP_HEAD, EngineConfig, Role
from graftline.engine.draft_choice import mtp_config
from graftline.engine.kv_pool import KvPool
from graftline.engine.memory_plan import (
    draft_geometry,
    draft_scratch_pages,
    keeps_nodes,
    plan_memory,
    state_geometry,
    target_geometry,
)
from graftline.engine.models.config import ModelConfig, config_from_dict
from graftline.engine.models.hybrid_config import LinearShape
from graftline.engine.state_pool import StateGeometry, StatePool
from graftline.engine.tree_shape import TreeShape
from graftline.engine.verify_mode import VerifyMode
from graftline.engine.verify_state import AcceptedPath, StepStates, VerifyState, build_verify_state
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.causal_conv import causal_conv
from graftline.kernels.gated_delta import delta_inputs, gated_delta
from graftline.kernels.state_rows import StateRows, build_state_rows, chain_rows

PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rope_theta": 10000000,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}
_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to measure; the defaults are the published model's on an H200.

    Attributes:
        budget_bytes: for pools when both roles are allocated; fewer layers are taken when not all fit.
        trees: (name, parents of the nodes, accepted nodes).
        rounds: timed ones, after two to warm up.
    """

    model: ModelConfig = field(default_factory=lambda: config_from_dict(PUBLISHED, {}))
    device: str = "cuda"
    num_slots: int = 256
    num_pages: int = 4096
    budget_bytes: int = 110 << 30
    batches: tuple[int, ...] = (1, 8, 32)
    trees: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
        ("V4 chain, 2 accepted", (-1, 0, 1, 2), (0, 1)),
        ("V4 chain, all accepted", (-1, 0, 1, 2), (0, 1, 2, 3)),
        ("V8 tree, 3 accepted", (-1, 0, 0, 1, 1, 2, 3, 5), (0, 2, 5)),
    )
    rounds: int = 20

    @property
    def linear(self) -> LinearShape:
        """Shapes of a linear layer."""
        assert self.model.hybrid is not None
        return self.model.hybrid.linear


# --- pools of both roles ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RolePools:
    """One role's pools. `driver_bytes` is how much less memory the driver called free once they were allocated."""

    role: str
    layers: int
    planned_bytes: int
    allocated_bytes: int
    driver_bytes: int
    state_bytes: int
    verify_state_bytes: int
    skipped_bytes: int


def role_config(sizes: Sizes, role: Role, num_layers: int) -> EngineConfig:
    """A worker with the first `num_layers` layers of the model."""
    return EngineConfig(
        model="published",
        role=role,
        verify_state=VerifyMode.SNAPSHOT,
        draft_head=MTP_HEAD,
        devices=(sizes.device,),
        layer_split=(num_layers,),
        page_size=_PAGE_SIZE,
        num_pages=sizes.num_pages,
        max_running=sizes.num_slots,
        tree=TreeShape(3, 1, 4),
    )


def fitting_layers(sizes: Sizes) -> int:
    """Most layers whose decode pools stay within the budget, in whole groups of three linear layers and one other."""
    head = mtp_config(sizes.model)
    counts = range(sizes.model.num_layers, 0, -4)
    planned = (
        (count, plan_memory(role_config(sizes, Role.DECODE, count), sizes.model, head).pool_bytes) for count in counts
    )
    return next(count for count, num_bytes in planned if num_bytes <= sizes.budget_bytes)


def measure_pools(sizes: Sizes) -> list[RolePools]:
    """Allocates the real pools of either role, one after the other."""
    layers = fitting_layers(sizes)
    return [_pools_of(sizes, role, layers) for role in (Role.PREFILL, Role.DECODE)]


def _pools_of(sizes: Sizes, role: Role, layers: int) -> RolePools:
    config, model, head = role_config(sizes, role, layers), sizes.model, mtp_config(sizes.model)
    memory = plan_memory(config, model, head)
    stage, owned = memory.stages[0], list[KvPool | StatePool | VerifyState]()
    _settle(sizes)
    before = _free_bytes(sizes)
    attention = model.attention_layers(range(layers))
    owned.append(KvPool(target_geometry(config, model, 0), config.num_pages, layers=attention, device=sizes.device))
    scratch, draft = draft_scratch_pages(config), draft_geometry(config, head)
    owned.append(KvPool(draft, config.num_pages, layers=(0,), scratch_pages=scratch, device=sizes.device))
    geometry = state_geometry(config, model, 0)
    assert geometry is not None
    owned.append(StatePool(geometry, config.max_running, sizes.device))
    if keeps_nodes(config):
        nodes = config.tree.nodes
        owned.append(build_verify_state(geometry, config.verify_state, config.max_running, nodes, sizes.device))
    _settle(sizes)
    taken = before - _free_bytes(sizes)
    return RolePools(
        role=role.value,
        layers=layers,
        planned_bytes=memory.pool_bytes,
        allocated_bytes=sum(pool.num_bytes for pool in owned),
        driver_bytes=taken,
        state_bytes=stage.state_bytes,
        verify_state_bytes=stage.verify_state_bytes,
        skipped_bytes=memory.skipped_bytes,
    )


def _free_bytes(sizes: Sizes) -> int:
    return torch.cuda.mem_get_info()[0] if sizes.device != "cpu" else 0


def _settle(sizes: Sizes) -> None:
    """What is freed goes back to the driver, so that its figure counts what is held."""
    if sizes.device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# --- replay beside snapshots ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Median seconds of one round of all linear layers.

    Attributes:
        round_s: verify and commit, launched one by one, until the device is done.
        verify_s: the verify alone, as one CUDA graph (launched one by one on CPU).
        commit_s: the commit alone.
    """

    mode: str
    tree: str
    batch: int
    node_bytes: int
    round_s: float
    verify_s: float
    commit_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Replay against snapshots: times of both, and whether outputs and states had the same bits."""

    times: tuple[RoundTimes, RoundTimes]
    identical: bool
    as_plain_decoding: bool

    @property
    def ratio(self) -> float:
        """Time of a round with replay over one with snapshots."""
        snapshot, replay = self.times
        return replay.round_s / snapshot.round_s


class Layers:
    """The linear layers' recurrences over given inputs, the same for every layer: states differ by layer's start."""

    def __init__(self, sizes: Sizes, batch: int, parents: Sequence[int]) -> None:
        shape, self._device = sizes.linear, torch.device(sizes.device)
        self.sizes, self.batch, self.parents = sizes, batch, list(parents)
        self._dtype = torch.float32 if sizes.device == "cpu" else torch.bfloat16
        count = batch * len(parents)
        self._generator = torch.Generator(self._device).manual_seed(1)
        self.x, self.gates = self._normal(count, shape.conv_channels), self._normal(count, 2 * shape.num_value_heads)
        self._weight = self._normal(shape.conv_width, shape.conv_channels)
        self._rate = torch.full((shape.num_value_heads,), 0.5, device=self._device)
        self._bias = torch.zeros(shape.num_value_heads, device=self._device)
        self.layers = sizes.model.linear_layers(range(sizes.model.num_layers))
        self.geometry = StateGeometry(self.layers, shape, torch.bfloat16)

    def _normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self._generator, device=self._device)
        return drawn.to(self._dtype)

    def pool(self) -> StatePool:
        """A filled pool of one slot a request."""
        pool = StatePool(self.geometry, self.batch, self._device)
        generator = torch.Generator(self._device).manual_seed(2)
        for layer in self.layers:
            for view in (pool.windows(layer), pool.states(layer)):
                view.copy_(torch.randn(view.shape, generator=generator, device=self._device))
        return pool

    def tree_rows(self) -> StateRows:
        """A tree a request."""
        nodes = len(self.parents)
        pages = range(-(-nodes // _PAGE_SIZE))
        batch = build_attention_batch(
            [SegmentRows(0, nodes, pages, self.parents)] * self.batch, _PAGE_SIZE, self._device
        )
        slots, trees = list(range(self.batch)), [True] * self.batch
        return build_state_rows(batch, [nodes] * self.batch, slots, trees)

    def run(self, states: StepStates, picked: Tensor | None = None) -> Tensor:
        """All layers once; outputs of the last one."""
        x, gates = (self.x, self.gates) if picked is None else (self.x[picked], self.gates[picked])
        shape, out = self.sizes.linear, x
        for layer in self.layers:
            mixed = causal_conv(x, self._weight, states.windows(layer), states.rows, states.node_windows(layer))
            q, k, decay, beta = delta_inputs(mixed, gates, self._rate, self._bias, shape.num_key_heads, shape.key_dim)
            v = mixed[:, 2 * shape.key_size :]
            states.keep_inputs(layer, x, k, v, decay, beta)
            made = gated_delta(q, k, v, decay, beta, states.states(layer), states.rows, states.node_states(layer))
            assert made is not None
            out = made
        return out


def compare_modes(sizes: Sizes, name: str, parents: Sequence[int], accepted: Sequence[int], batch: int) -> Comparison:
    """Both modes over the same rounds."""
    layers = Layers(sizes, batch, parents)
    results = [_run_mode(layers, mode, name, accepted) for mode in (VerifyMode.SNAPSHOT, VerifyMode.REPLAY)]
    (snapshot, first_out, first_state), (replay, second_out, second_state) = results
    identical = torch.equal(first_out, second_out) and torch.equal(first_state, second_state)
    plain = torch.equal(first_state, _plain_state(layers, accepted))
    return Comparison((snapshot, replay), identical, plain)


def _run_mode(
    layers: Layers, mode: VerifyMode, name: str, accepted: Sequence[int]
) -> tuple[RoundTimes, Tensor, Tensor]:
    """Times of a mode; outputs and states of its first round, before any timing."""
    sizes, pool = layers.sizes, layers.pool()
    verify = build_verify_state(layers.geometry, mode, layers.batch, len(layers.parents), sizes.device)
    states = StepStates(pool, verify, layers.tree_rows())
    paths = [AcceptedPath(slot, accepted) for slot in range(layers.batch)]
    out = layers.run(states)
    verify.commit(pool, paths)
    first_state = pool.data.clone()

    def whole_round() -> None:
        layers.run(states)
        verify.commit(pool, paths)

    times = RoundTimes(
        mode=mode.value,
        tree=name,
        batch=layers.batch,
        node_bytes=verify.num_bytes // (layers.batch + 1) // (len(layers.parents) - 1),
        round_s=timed(sizes, whole_round),
        verify_s=timed(sizes, as_graph(sizes, lambda: layers.run(states))),
        commit_s=timed(sizes, lambda: verify.commit(pool, paths)),
    )
    return times, out, first_state


def _plain_state(layers: Layers, accepted: Sequence[int]) -> Tensor:
    """The states that decoding the accepted path token by token leaves."""
    pool, nodes = layers.pool(), len(layers.parents)
    device = pool.data.device
    for node in accepted:
        rows = chain_rows(list(range(layers.batch)), [1] * layers.batch, device)
        picked = torch.arange(layers.batch, device=device) * nodes + node
        layers.run(StepStates(pool, None, rows), picked)
    return pool.data


# --- timing -----------------------------------------------------------------------------------------------------------


def timed(sizes: Sizes, run: Callable[[], object]) -> float:
    """Median seconds until the device is done, after two runs to warm up."""
    seconds = []
    for _ in range(sizes.rounds + 2):
        _wait(sizes)
        started = time.perf_counter()
        run()
        _wait(sizes)
        seconds.append(time.perf_counter() - started)
    return median(seconds[2:])


def as_graph(sizes: Sizes, run: Callable[[], object]) -> Callable[[], object]:
    """The same as one CUDA graph, so that launches cost nothing."""
    if sizes.device == "cpu":
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _wait(sizes: Sizes) -> None:
    if sizes.device != "cpu":
        torch.cuda.synchronize()


def measure(sizes: Sizes) -> dict[str, Any]:
    """Everything, as JSON takes it."""
    with torch.inference_mode():
        pools = measure_pools(sizes)
        _settle(sizes)
        compared = [
            compare_modes(sizes, name, parents, accepted, batch)
            for name, parents, accepted in sizes.trees
            for batch in sizes.batches
        ]
    return {
        "machine": torch.cuda.get_device_name() if sizes.device != "cpu" else platform.processor(),
        "torch": torch.__version__,
        "pools": [asdict(pool) for pool in pools],
        "verify_state": [
            {
                "snapshot": asdict(result.times[0]),
                "replay": asdict(result.times[1]),
                "bytes_ratio": result.times[1].node_bytes / result.times[0].node_bytes,
                "time_ratio": result.ratio,
                "identical": result.identical,
                "as_plain_decoding": result.as_plain_decoding,
            }
            for result in compared
        ],
    }


def main() -> None:
    """Measures at the published model's size and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-gib", type=int, default=110)
    arguments = parser.parse_args()
    found = measure(Sizes(budget_bytes=arguments.budget_gib << 30))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
