"""Puts a worker's engine together: pipeline, scheduler, and what the services tell others about it."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from graftline.engine.config import MTP_HEAD, EngineConfig, Role
from graftline.engine.decode_engine import DecodeScheduler
from graftline.engine.draft_choice import chosen_head
from graftline.engine.draft_head.config import CONFIG_FILE, WEIGHTS_FILE
from graftline.engine.layer_split import check_split
from graftline.engine.memory_plan import MemoryPlan, plan_memory
from graftline.engine.models.card import ModelCardData
from graftline.engine.models.checkpoint import Checkpoint, open_checkpoint
from graftline.engine.pipeline import Pipeline, StageCommand
from graftline.engine.plan import Report, StageAlive
from graftline.engine.prefill_engine import PrefillScheduler
from graftline.engine.service_api import EngineLoad
from graftline.engine.step_pipeline import StepPipeline
from graftline.engine.step_watch import StepWatch
from graftline.engine.transfer_port import TransferPort
from graftline.errors import InvalidRequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says about itself.

    Attributes:
        context_len: most tokens of prompt and output that the model and the worker's pool can hold.
        fingerprint: everything that must agree between a prefill and a decode, by name.
        memory: what the pools and weights of every stage take.
        has_state: the model keeps recurrent state.
    """

    card: ModelCardData
    context_len: int
    fingerprint: Mapping[str, str]
    num_stages: int
    memory: MemoryPlan | None = None
    has_state: bool = False


def worker_facts(config: EngineConfig, checkpoint: Checkpoint) -> WorkerFacts:
    """Derives the facts from the configuration."""
    model, tree = checkpoint.config, config.tree
    fingerprint = {
        "model_hash": checkpoint.model_hash,
        "dtype": config.dtype,
        "page_size": str(config.page_size),
        "context_length": str(model.context_length),
        "vocab_size": str(model.vocab_size),
        "draft_depth": str(tree.depth),
        "draft_branching": str(tree.branching),
        "draft_nodes": str(tree.nodes),
        "drafter_hash": draft_head_hash(config.draft_head) if tree.speculates and config.draft_head else "none",
    }
    pool_len = config.num_pages * config.page_size
    memory = plan_memory(config, model, chosen_head(config, model))
    card = checkpoint.card
    return WorkerFacts(
        replace(card, model_id=config.model_name) if config.model_name else card,
        min(model.context_length, pool_len),
        fingerprint,
        config.num_stages,
        memory,
        bool(model.linear_layers(range(model.num_layers))),
    )


def draft_head_hash(draft_head: str) -> str:
    """Equal for equal draft heads, wherever they lie; 32 hex digits. An MTP module is in the model's hash already.

    Raises:
        InvalidRequestError: a file of it cannot be read.
    """
    if draft_head == MTP_HEAD:
        return MTP_HEAD
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            digest.update((Path(draft_head) / name).read_bytes())
        except OSError as error:
            raise InvalidRequestError("draft_head", f"cannot be read: {error}") from error
    return digest.hexdigest()[:32]


Scheduler = TypeVar("Scheduler", PrefillScheduler, DecodeScheduler)


class WorkerEngine(Generic[Scheduler]):
    """A running engine.

    Attributes:
        facts: what the worker says about itself.
        scheduler: what the services talk to.
    """

    def __init__(self, facts: WorkerFacts, scheduler: Scheduler, pipeline: Pipeline) -> None:
        memory = None if facts.memory is None else facts.memory.started(pipeline.graph_bytes, pipeline.ring_bytes)
        self.facts = replace(facts, memory=memory)
        self.scheduler: Scheduler = scheduler
        self._pipeline = pipeline

    @property
    def layouts(self) -> Sequence[bytes]:
        """What every stage's transfer port said of its pools, stage by stage."""
        return self._pipeline.layouts

    def load(self) -> EngineLoad:
        """A snapshot of queues and pools."""
        return self.scheduler.load()

    def stage_load(self) -> Sequence[StageAlive]:
        """The last sign of life of every stage."""
        return self._pipeline.stage_load()

    def stop(self, timeout_s: float) -> None:
        """Ends the loop and every stage; open requests are not waited for."""
        self.scheduler.thread.stop(timeout_s / 2)
        self._pipeline.stop(timeout_s / 2)


def start_prefill_engine(
    config: EngineConfig, port: Callable[[int], TransferPort], command: StageCommand, timeout_s: float
) -> WorkerEngine[PrefillScheduler]:
    """Starts every stage of a prefill worker and its loop.

    Raises:
        InvalidRequestError: the configuration does not fit the model.
        InternalError: a stage did not start within `timeout_s`.
    """
    assert config.role is Role.PREFILL
    facts, inbox, pipeline = _prepare(config, port, command)
    if facts.has_state and config.prefix_cache:
        logger.info("no prefix cache: recurrent state goes with a whole prompt only")
        config = msgspec.structs.replace(config, prefix_cache=False)
    scheduler = PrefillScheduler(
        config, _watched(pipeline, config), facts.context_len, facts.card.vocab_size, facts.has_state
    )
    _run(scheduler, pipeline, inbox, timeout_s)
    return WorkerEngine(facts, scheduler, pipeline)


def start_decode_engine(
    config: EngineConfig, port: Callable[[int], TransferPort], command: StageCommand, timeout_s: float
) -> WorkerEngine[DecodeScheduler]:
    """Starts every stage of a decode worker and its loop.

    Raises:
        InvalidRequestError: the configuration does not fit the model.
        InternalError: a stage did not start within `timeout_s`.
    """
    assert config.role is Role.DECODE
    facts, inbox, pipeline = _prepare(config, port, command)
    scheduler = DecodeScheduler(
        config, _watched(pipeline, config), facts.context_len, facts.card.vocab_size, facts.has_state
    )
    _run(scheduler, pipeline, inbox, timeout_s)
    return WorkerEngine(facts, scheduler, pipeline)


class _LateInbox:
    """Stands for the scheduler's inbox until there is a scheduler; nothing is reported before that."""

    def __init__(self) -> None:
        self.forward: Callable[[Report], None] | None = None

    def put(self, item: Report) -> None:
        if self.forward is not None:
            self.forward(item)


def _prepare(
    config: EngineConfig, port: Callable[[int], TransferPort], command: StageCommand
) -> tuple[WorkerFacts, _LateInbox, Pipeline]:
    checkpoint = open_checkpoint(Path(config.model))
    check_split(config.layer_split, checkpoint.config.num_layers)
    inbox = _LateInbox()
    return worker_facts(config, checkpoint), inbox, Pipeline(config, port, command, inbox)


def _watched(pipeline: Pipeline, config: EngineConfig) -> StepPipeline:
    watch = StepWatch(config.heartbeat_s, config.stage_timeout_s, config.step_timeout_s)
    return StepPipeline(pipeline, watch)


def _run(
    scheduler: PrefillScheduler | DecodeScheduler, pipeline: Pipeline, inbox: _LateInbox, timeout_s: float
) -> None:
    inbox.forward = scheduler.thread.put
    try:
        pipeline.start(timeout_s)
    except BaseException:
        pipeline.stop(5.0)
        raise
    scheduler.thread.start()
