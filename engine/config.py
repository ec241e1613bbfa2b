"""One frozen configuration per worker; every stage process gets the same one."""

from enum import Enum

import msgspec

from graftline.engine.tree_shape import TreeShape
from graftline.engine.verify_mode import VerifyMode
from graftline.errors import InvalidRequestError
from graftline.kernels.attention_kind import AttentionBackend as AttentionBackend

# Of a stage: beyond any machine's cores, and below what makes a thread library fail.
MAX_THREADS = 1024

MTP_HEAD = "mtp"
"""In place of a draft head's directory: the MTP module of the target's own checkpoint."""


class Role(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class StageMode(Enum):
    """How the stages of one worker run."""

    AUTO = "auto"
    """Threads where all are on one GPU, which would divide its time between processes; else processes."""
    PROCESSES = "processes"
    THREADS = "threads"


class StageChannel(Enum):
    """How hidden states go between stages that are processes."""

    AUTO = "auto"
    """Directly between two GPUs, else through host memory."""
    HOST = "host"
    DIRECT = "direct"
    """From device to device: memory of the other GPU where stages on one host reach each other's, else NCCL, which
    refuses two stages on one GPU; gloo on CPU."""
    NCCL = "nccl"
    """NCCL alone."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is built from. "auto" values are resolved before this is made.

    Attributes:
        model: directory or GGUF file.
        model_name: what requests call it; empty: the name of its directory or file.
        draft_head: directory of the draft head, or `MTP_HEAD`; None turns speculation off.
        dtype: "float32" or "bfloat16"; on CPU the type that weights and KV are stored in.
        devices: "cpu" or "cuda:N" of every stage; a single one is that of all. All are of one kind.
        layer_split: target layers of every stage.
        stage_channel: how hidden states go between stages that are processes.
        page_size: token positions a page.
        num_pages: pages of the worker (the same on every stage).
        max_running: request slots.
        max_queued: waiting requests beyond which new ones are refused.
        chunk_tokens: most prompt tokens of one prefill step.
        tree: shape of the draft trees; a decode takes initial trees as deep as it says, cuts deeper ones off.
        real_trees: a prefill grows trees (else root-only).
        prefix_cache: a prefill keeps the KV of finished prompts for later ones; off for models with recurrent state.
        verify_state: what a decode keeps of draft nodes, of models with recurrent state.
        threads: CPU threads of every stage.
        heartbeat_s: seconds between two heartbeats to every stage.
        stage_timeout_s: heartbeats of so long without an answer mean that a stage is dead or stands still. Threads
            that do nothing else answer them: a long step is no silence.
        step_timeout_s: a step without any progress for so long is hung; see `engine/step_watch.py`.
        quarantine_s: how long pages stay out of use when nothing is known of their writer; above the transport's
            own timeout.
        quarantine_wait_s: a request for which nothing but the end of a quarantine makes room is refused after so long:
            another decode may have room.
        attention_backend: how planned steps attend; see `AttentionBackend`. Every stage settles AUTO for its own
            machine.
        device_rounds: a decode's rounds have a fixed shape and keep their values on the device; see
            `engine/device_rounds.py`. Slower on CPU, where it serves tests.
        launch_drafts_early: a prefill launches a prompt's drafter rows and tree before it reads the first token; see
            `engine/prompt_end.py`. On CPU it serves tests.
        cuda_graphs: rounds of fixed shape, and a prefill's steps of few rows, are captured and replayed; no effect on
            CPU.
        max_graph_batch: sequences of the largest captured round; larger ones run op by op.
        max_verify_rows: of a round of fixed shape, above which its trees are cut to their likeliest nodes, a chain's at
            least; 0 for no such limit.
        overlap: a round is launched before the host has read the one before; needs `device_rounds`, and stages
            that share a device or have one each.
        preempt_every: forced preemption every so many rounds, a test hook; 0 is off.
    """

    model: str
    model_name: str = ""
    role: Role
    draft_head: str | None = None
    dtype: str = "bfloat16"
    devices: tuple[str, ...] = ("cpu",)
    layer_split: tuple[int, ...]
    stage_mode: StageMode = StageMode.PROCESSES
    stage_channel: StageChannel = StageChannel.AUTO
    page_size: int = 16
    num_pages: int = 4096
    max_running: int = 16
    max_queued: int = 1024
    chunk_tokens: int = 256
    tree: TreeShape = TreeShape()
    real_trees: bool = True
    prefix_cache: bool = True
    verify_state: VerifyMode = VerifyMode.REPLAY
    threads: int = 1
    heartbeat_s: float = 0.25
    stage_timeout_s: float = 2.0
    step_timeout_s: float = 10.0
    quarantine_s: float = 60.0
    quarantine_wait_s: float = 5.0
    attention_backend: AttentionBackend = AttentionBackend.AUTO
    device_rounds: bool = False
    launch_drafts_early: bool = False
    cuda_graphs: bool = True
    max_graph_batch: int = 64
    max_verify_rows: int = 0
    overlap: bool = True
    preempt_every: int = 0

    def __post_init__(self) -> None:
        if self.max_verify_rows < 0:
            raise InvalidRequestError("max_verify_rows", f"{self.max_verify_rows} is negative")
        positive = ("page_size", "num_pages", "max_running", "max_queued", "chunk_tokens", "threads")
        for name in positive:
            if getattr(self, name) < 1:
                raise InvalidRequestError(name, f"{getattr(self, name)} is below 1")
        if self.threads > MAX_THREADS:
            raise InvalidRequestError("threads", f"{self.threads} is above {MAX_THREADS}")
        for name in ("heartbeat_s", "stage_timeout_s", "step_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequestError(name, f"{getattr(self, name)} is not positive")
        if not self.model_name.isprintable():
            raise InvalidRequestError("model_name", f"{self.model_name!r} cannot be printed")
        if self.dtype not in ("float32", "bfloat16"):
            raise InvalidRequestError("dtype", f"{self.dtype!r} is neither float32 nor bfloat16")
        if not self.layer_split or min(self.layer_split) < 1:
            raise InvalidRequestError("layer_split", f"{self.layer_split}: every stage needs a layer")
        if len(self.devices) not in (1, self.num_stages):
            raise InvalidRequestError("devices", f"{self.devices} for {self.num_stages} stages")
        if len({device.partition(":")[0] for device in self.devices}) > 1:
            raise InvalidRequestError("devices", f"{self.devices} are of different kinds")
        if self.tree.speculates and self.draft_head is None:
            raise InvalidRequestError("draft_head", f"a tree of {self.tree.nodes} nodes needs a draft head")

    def round_nodes(self, sequences: int) -> int:
        """V of a round of fixed shape with so many sequences."""
        return self.tree.nodes_among(sequences, self.max_verify_rows)

    @property
    def grown_tree(self) -> TreeShape:
        """The trees that this worker grows: a prefill those of first rounds, a decode those of all others."""
        return self.tree.initial if self.role is Role.PREFILL else self.tree

    @property
    def is_on_one_device(self) -> bool:
        """No stage waits for another device while it computes: there is one, or they are threads of one device."""
        return self.num_stages == 1 or (self.stage_mode is StageMode.THREADS and len(set(self.devices)) == 1)

    @property
    def rounds_ahead(self) -> int:
        """Rounds of one microbatch that may be under way at once."""
        runs_ahead = self.device_rounds and self.overlap and self.is_on_one_device
        return 2 if runs_ahead or self.returns_rounds else 1

    @property
    def returns_rounds(self) -> bool:
        """The last stage's rounds go back to the earlier stages from device to device, so that they can run ahead of
        the host: stages are processes, each on a device of its own as far as can be seen from here.
        """
        if self.stage_mode is StageMode.THREADS or self.num_stages == 1 or not (self.device_rounds and self.overlap):
            return False
        if self.stage_channel is StageChannel.AUTO:
            return self.device_type == "cuda" and len(set(self.devices)) == self.num_stages
        return self.stage_channel in (StageChannel.DIRECT, StageChannel.NCCL)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.layer_split)

    @property
    def device_type(self) -> str:
        """The kind of every stage's device: "cpu" or "cuda"."""
        return self.devices[0].partition(":")[0]

    def stage_device(self, stage: int) -> str:
        """A stage's device."""
        return self.devices[stage if len(self.devices) > 1 else 0]

    def stage_layers(self, stage: int) -> range:
        """Global ids of a stage's layers."""
        first = sum(self.layer_split[:stage])
        return range(first, first + self.layer_split[stage])

    def to_json(self) -> str:
        """Text that `from_json` reads back; how stage processes get it."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "EngineConfig":
        """The opposite of `to_json`."""
        return msgspec.json.decode(text, type=cls)
