"""One training run over a corpus: batches through the target, the unrolled head and the loss, step by step.

Knows no files; a run's whole state goes out and in as one dictionary.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graftline.engine.draft_head.config import DraftHeadConfig, DraftHeadKind
from graftline.engine.draft_head.corpus import batches
from graftline.engine.draft_head.data import Dialogs
from graftline.engine.draft_head.losses import DistillationLoss, LevelScores, LossOptions
from graftline.engine.draft_head.module import DraftHeadModule, Unroller, to_logit_space
from graftline.engine.draft_head.spread import FeatureSpread
from graftline.engine.draft_head.target import TargetRunner


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How weights move.

    Attributes:
        optimizer: "muon" (matrices by Muon, the rest by AdamW) or "adamw" (all by AdamW).
        learning_rate: peak; warmed up linearly, then a cosine down to `final_share` of it.
        num_steps: length of the schedule.
        max_seconds: the schedule ends by then even if steps are left.
        batch_rows: dialogs a step.
        num_levels: depth of the unrolling, the first level included.
        answers_only: learn from the answers' tokens alone rather than from all.
        loss_chunk: rows of logits held at a time.
    """

    optimizer: str = "muon"
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    final_share: float = 0.02
    num_steps: int = 1000
    max_seconds: float = math.inf
    batch_rows: int = 48
    num_levels: int = 4
    answers_only: bool = True
    loss_chunk: int = 4096
    seed: int = 0
    loss: LossOptions = field(default_factory=LossOptions)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands; `cross_entropy` and `agreement` are per level, of the latest step."""

    step: int
    share_done: float
    tokens_seen: int
    seconds: float
    cross_entropy: tuple[float, ...]
    agreement: tuple[float, ...]


class Trainer:
    """Trains one head against one target on one corpus."""

    def __init__(
        self,
        runner: TargetRunner,
        dialogs: Dialogs,
        config: DraftHeadConfig,
        spread: FeatureSpread,
        kept_ids: Tensor,
        options: StepOptions,
        *,
        compiled: bool,
    ) -> None:
        target = runner.target
        self.options, self.config, self._spread, self._dialogs = options, config, spread, dialogs
        self._runner = runner
        # EAGLE reads its own raw outputs at deeper levels, so its matrices must read raw features at every level.
        self._folded = spread if config.kind is DraftHeadKind.EAGLE else None
        self._feature_layers = config.features_of(target.shape.num_layers)
        self._dtype = target.embed.dtype
        self._vocab_rows = target.lm_head[kept_ids]
        self.module = DraftHeadModule(config, len(self._feature_layers), seed=options.seed).to(target.device)
        self._unroller = Unroller(config, compiled=compiled)
        self._loss = DistillationLoss(options.loss, chunk=options.loss_chunk, compiled=compiled)
        self._optimizers = _optimizers(self.module, options)
        self._num_loss_rows = self._loss_rows_per_batch()
        self._step = 0
        self._seconds = 0.0

    def train(self, report: Callable[[Progress], None] | None = None, *, report_every: int = 50) -> Progress:
        """Step until the schedule ends; calls `report` now and then."""
        options = self.options
        progress = Progress(self._step, 0.0, 0, self._seconds, (), ())
        rows_of = batches(len(self._dialogs.tokens), options.batch_rows, options.seed, self._step)
        started, before = time.monotonic(), self._seconds
        for rows in rows_of:
            self._seconds = before + time.monotonic() - started
            done = max(self._step / options.num_steps, self._seconds / options.max_seconds)
            if done >= 1:
                break
            scores = self._take_step(rows.to(self._dialogs.tokens.device), done)
            self._step += 1
            last = self._step >= options.num_steps
            if report is not None and (self._step % report_every == 0 or last):
                tokens_seen = self._step * options.batch_rows * self._dialogs.tokens.shape[1]
                entropy, agreement = scores.cross_entropy.tolist(), scores.agreement.tolist()
                progress = Progress(self._step, done, tokens_seen, self._seconds, tuple(entropy), tuple(agreement))
                report(progress)
        return progress

    def state(self) -> dict[str, Any]:
        """Everything another trainer of equal options needs to go on from here."""
        return {
            "step": self._step,
            "seconds": self._seconds,
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a state of `state()`."""
        self._step, self._seconds = state["step"], state["seconds"]
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _take_step(self, rows: Tensor, done: float) -> LevelScores:
        options = self.options
        rate = learning_rate_at(options, self._step, done)
        tokens, answers = self._dialogs.tokens[rows].long(), self._dialogs.answers[rows]
        hidden = self._runner.features(tokens, self._feature_layers)
        features, weights = hidden.features[:, :-2], self.module.cast(self._dtype, self._folded)
        if self._folded is None:
            features = self._spread.standardise(features)
        embeddings = functional.embedding(tokens[:, 1:-1], self._runner.target.embed)
        picked = self._pick_rows(answers[:, 2:])
        outputs = torch.stack(
            [
                to_logit_space(self.config, weights, output.flatten(0, 1)[picked])
                for output in self._unroller.unroll(weights, embeddings, features, options.num_levels)
            ]
        )
        scores = self._loss(outputs, hidden.final[:, 1:-1].flatten(0, 1)[picked], self._vocab_rows)
        torch.autograd.backward(self._loss.total(scores))
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return scores

    def _loss_rows_per_batch(self) -> int:
        """A fixed number of rows whose loss is taken each step: about as many as there are answer tokens."""
        rows = self.options.batch_rows * (self._dialogs.tokens.shape[1] - 2)
        share = float(self._dialogs.answers.float().mean()) if self.options.answers_only else 1.0
        chunk = self.options.loss_chunk
        return max(int(rows * share) // chunk, 1) * chunk

    def _pick_rows(self, wanted: Tensor) -> Tensor:
        """Row numbers [M] of a random choice among wanted rows; the first levels' rows are never wanted."""
        generator = torch.Generator(wanted.device).manual_seed(self.options.seed * 1_000_003 + self._step)
        keys = torch.rand(wanted.shape, device=wanted.device, generator=generator)
        if self.options.answers_only:
            keys = keys + wanted
        keys[:, : self.options.num_levels] = -1
        return keys.flatten().topk(self._num_loss_rows, sorted=False).indices


def learning_rate_at(options: StepOptions, step: int, done: float) -> float:
    """The rate at a step, `done` being the share of the schedule that lies behind."""
    warm = min(1.0, (step + 1) / options.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return options.learning_rate * warm * (options.final_share + (1 - options.final_share) * cosine)


def _optimizers(module: DraftHeadModule, options: StepOptions) -> list[torch.optim.Optimizer]:
    parameters = list(module.parameters())
    rate, decay = options.learning_rate, options.weight_decay
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    vectors = [parameter for parameter in parameters if parameter.ndim != 2]
    if options.optimizer == "adamw":
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))]
    assert options.optimizer == "muon", f"unknown optimizer {options.optimizer!r}"
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
