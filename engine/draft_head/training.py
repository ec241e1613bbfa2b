"""`draft-head train`: from a model alone to a head on disk, in phases that survive an interruption.

The working folder keeps dialogs (one file a batch) and the training state; started again with equal options, a run
goes on from there.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from graftline.engine.draft_head.config import FINAL_NORM, DraftHeadConfig, DraftHeadKind
from graftline.engine.draft_head.corpus import draft_vocabulary
from graftline.engine.draft_head.data import DialogGenerator, Dialogs, WritingOptions
from graftline.engine.draft_head.dialogs import DialogWriter
from graftline.engine.draft_head.prompts import opening
from graftline.engine.draft_head.spread import feature_spread
from graftline.engine.draft_head.target import Target, TargetRunner
from graftline.engine.draft_head.trainer import Progress, StepOptions, Trainer
from graftline.engine.draft_head.weights import fold_spread, write_draft_head
from graftline.engine.models.checkpoint import Checkpoint, open_checkpoint
from graftline.engine.models.config import ModelConfig
from graftline.errors import InvalidRequestError

_STATE_FILE = "state.pt"
_OPTIONS_FILE = "options.json"
_SPREAD_ROWS = 64
_SAVE_EVERY_S = 60.0
# Kinds of 16 batches of dialogs: chat 6, code 4, tools 4, arithmetic 2.
KIND_CYCLE = (
    *("chat", "code", "tools", "chat", "arithmetic", "code", "tools", "chat"),
    *("code", "tools", "chat", "arithmetic", "code", "chat", "tools", "chat"),
)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train and on how much.

    Attributes:
        work: folder of dialogs and training state; may be deleted afterwards.
        feature_layers: as in `DraftHeadConfig`; empty for those after 4/15 and 2/3 of the layers and the final norm.
        intermediate_size: width of the head's MLP; 0 for the target's own.
        kinds: kinds of prompts, one a batch, over and over.
        num_batches, batch_dialogs, dialog_len: dialogs written, in tokens num_batches * batch_dialogs * dialog_len.
        greedy_share: share of rows whose answers are greedy; the rest is drawn at 0.7 or 1.
        steps: how weights move; its seed is also the dialogs'.
    """

    model: Path
    out: Path
    work: Path
    kind: DraftHeadKind = DraftHeadKind.EAGLE3
    feature_layers: tuple[int, ...] = ()
    intermediate_size: int = 0
    draft_vocab_size: int = 16384
    kinds: tuple[str, ...] = KIND_CYCLE
    num_batches: int = 14
    batch_dialogs: int = 4096
    dialog_len: int = 770
    greedy_share: float = 0.7
    writing: WritingOptions = field(default_factory=WritingOptions)
    steps: StepOptions = field(default_factory=StepOptions)
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


class TrainReport(Protocol):
    """Hears how a run goes."""

    def phase(self, name: str) -> None:
        """A phase begins."""

    def dialogs_written(self, done: int, total: int) -> None:
        """Batches of dialogs that exist."""

    def stepped(self, progress: Progress) -> None:
        """Training moved on."""


def train(options: TrainOptions, report: TrainReport) -> DraftHeadConfig:
    """Train a head and write it to `options.out`; returns its config.

    Raises:
        InvalidRequestError: the model cannot be used, or the working folder belongs to a run of other options.
    """
    checkpoint = open_checkpoint(options.model)
    config = head_config(checkpoint, options)
    _claim(options)
    device = torch.device(options.device)
    compiled = device.type == "cuda"
    report.phase("reading the model")
    target = Target.load(checkpoint, device, options.dtype)
    runner = TargetRunner(target, compiled=compiled)
    writer = DialogWriter(checkpoint.card)
    report.phase("writing dialogs")
    dialogs = write_dialogs(runner, writer, options, report)
    plain = TargetRunner(target, compiled=False)
    spread = feature_spread(plain, dialogs, config.features_of(target.shape.num_layers), _SPREAD_ROWS)
    kept = draft_vocabulary(dialogs, config.vocab_size, config.draft_vocab_size, writer.format.always_kept)
    report.phase("training")
    trainer = Trainer(runner, dialogs, config, spread, kept, options.steps, compiled=compiled)
    _train_resumably(trainer, options.work / _STATE_FILE, report)
    write_draft_head(options.out, config, fold_spread(config, trainer.module.tensors(), spread), kept)
    return config


def head_config(checkpoint: Checkpoint, options: TrainOptions) -> DraftHeadConfig:
    """The config of the head that these options train."""
    target = checkpoint.config
    eagle3 = options.kind is DraftHeadKind.EAGLE3
    return DraftHeadConfig(
        kind=options.kind,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(options.draft_vocab_size, target.vocab_size),
        feature_layers=options.feature_layers or _default_layers(target) if eagle3 else (FINAL_NORM,),
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope.theta,
        context_length=target.context_length,
        norm_output=eagle3,
        input_norm=eagle3,
        target_model=checkpoint.card.model_id,
        target_sha256=_file_hash(checkpoint.path),
    )


def write_dialogs(runner: TargetRunner, writer: DialogWriter, options: TrainOptions, report: TrainReport) -> Dialogs:
    """Write the batches that the working folder lacks, and load all of them."""
    generator = DialogGenerator(runner, writer.format, options.writing, compiled=runner.target.device.type == "cuda")
    batches = []
    for number in range(options.num_batches):
        file = options.work / f"dialogs-{number:05d}.safetensors"
        if not file.exists():
            _save_atomically(file, _write_batch(generator, writer, options, number))
        batches.append(load_file(file, device=options.device))
        report.dialogs_written(number + 1, options.num_batches)
    return Dialogs(
        torch.cat([batch["tokens"] for batch in batches]), torch.cat([batch["answers"] for batch in batches])
    )


def openings(writer: DialogWriter, kind: str, first_seed: int, count: int, max_len: int) -> list[list[int]]:
    """Ids of `count` begun dialogs of a kind, the ones longer than `max_len` left out, in order of length."""
    prefixes: list[list[int]] = []
    for seed in range(first_seed, first_seed + 8 * count):
        begun = opening(kind, seed)
        ids = writer.open_user_turn_ids(begun.system, begun.start)
        if len(ids) <= max_len:
            prefixes.append(ids)
        if len(prefixes) == count:
            break
    if not prefixes:
        raise InvalidRequestError("dialog_len", f"no {kind} prompt begins in {max_len} tokens")
    while len(prefixes) < count:
        prefixes.append(prefixes[len(prefixes) % max(len(prefixes) // 2, 1)])
    return sorted(prefixes, key=len)


def _write_batch(
    generator: DialogGenerator, writer: DialogWriter, options: TrainOptions, number: int
) -> dict[str, torch.Tensor]:
    count, seed = options.batch_dialogs, options.steps.seed * 100_003 + number
    kind = options.kinds[number % len(options.kinds)]
    prefixes = openings(writer, kind, seed * 10 * count, count, options.dialog_len * 2 // 3)
    torch.manual_seed(seed)
    warm = torch.where(torch.rand(count) < 0.5, 0.7, 1.0)
    temperatures = torch.where(torch.rand(count) < options.greedy_share, 0.0, warm)
    dialogs = generator.write(prefixes, options.dialog_len, temperatures)
    return {"tokens": dialogs.tokens.cpu(), "answers": dialogs.answers.cpu()}


def _train_resumably(trainer: Trainer, state_file: Path, report: TrainReport) -> None:
    if state_file.exists():
        trainer.restore(torch.load(state_file, weights_only=True, map_location="cpu"))
    saved_at = time.monotonic()

    def stepped(progress: Progress) -> None:
        nonlocal saved_at
        report.stepped(progress)
        if time.monotonic() - saved_at > _SAVE_EVERY_S:
            save_state(trainer, state_file)
            saved_at = time.monotonic()

    trainer.train(stepped, report_every=20)
    save_state(trainer, state_file)


def save_state(trainer: Trainer, file: Path) -> None:
    """Write a trainer's state so that an interrupted write leaves the older one."""
    scratch = file.with_suffix(".new")
    torch.save(trainer.state(), scratch)
    scratch.replace(file)


def _claim(options: TrainOptions) -> None:
    """Make the working folder, or check that it is this run's."""
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / _OPTIONS_FILE
    fields = json.loads(json.dumps(asdict(options), default=str))
    for free in ("out", "work", "device"):
        fields.pop(free)
    if file.exists():
        earlier: dict[str, Any] = json.loads(file.read_text())
        differing = sorted(key for key in fields.keys() | earlier.keys() if fields.get(key) != earlier.get(key))
        if differing:
            raise InvalidRequestError("work", f"{options.work} holds a run with other {', '.join(differing)}")
        return
    file.write_text(json.dumps(fields, indent=2))


def _default_layers(target: ModelConfig) -> tuple[int, ...]:
    return (target.num_layers * 4 // 15, target.num_layers * 2 // 3, FINAL_NORM)


def _file_hash(path: Path) -> str:
    """SHA-256 of a weight file; "" for a folder of several files."""
    files: Sequence[Path] = (
        [path] if path.is_file() else sorted(path.glob("*.gguf")) or sorted(path.glob("*.safetensors"))
    )
    if len(files) != 1:
        return ""
    with files[0].open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _save_atomically(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    scratch = file.with_suffix(".new")
    save_file(tensors, scratch)
    scratch.replace(file)
