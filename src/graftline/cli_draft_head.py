"""`graftline draft-head`: train a draft head for a model, and measure one."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import graftline
from graftline.engine.draft_head.config import DraftHeadKind
from graftline.engine.draft_head.evaluation import EvalOptions, TemperatureFigures, evaluate
from graftline.engine.draft_head.measure import mean_accept_length
from graftline.engine.draft_head.prompt_overlap import prompt_overlap
from graftline.engine.draft_head.trainer import Progress as TrainProgress
from graftline.engine.draft_head.trainer import StepOptions
from graftline.engine.draft_head.training import TrainOptions
from graftline.engine.draft_head.training import train as run_training
from graftline.engine.model_fetch import draft_head_path, resolve_model
from graftline.errors import InvalidRequestError

app = typer.Typer(help="Train a draft head for a model, or measure one.", no_args_is_help=True)
HELD_OUT_PROMPTS = Path(graftline.__file__).parent / "bench" / "prompts" / "heldout.jsonl"
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto (bfloat16 on cuda, else float32), float32 or bfloat16.")]


@app.command()
def train(
    model: Annotated[str, typer.Option(help="A known name, a model directory or a .gguf file.")],
    out: Annotated[Path, typer.Option(help="Folder for the head.")],
    work: Annotated[Path | None, typer.Option(help="Folder of dialogs and state, to resume from: OUT/work.")] = None,
    kind: Annotated[Literal["eagle", "eagle3"], typer.Option(help="Layout of the head.")] = "eagle3",
    feature_layers: Annotated[str, typer.Option(help="Such as 8,20,-1: residual after n layers, -1 final norm.")] = "",
    intermediate_size: Annotated[int, typer.Option(min=0, help="Width of the MLP; 0: as the model's.")] = 0,
    draft_vocab: Annotated[int, typer.Option(min=1, help="Ids the head can draft.")] = 16384,
    batches: Annotated[int, typer.Option(min=1, help="Batches of dialogs to write.")] = 14,
    batch_dialogs: Annotated[int, typer.Option(min=0, help="Dialogs a batch; 0: 4096 on cuda, else 32.")] = 0,
    dialog_len: Annotated[int, typer.Option(min=32, help="Tokens a dialog.")] = 770,
    greedy_share: Annotated[float, typer.Option(min=0, max=1, help="Share of dialogs with greedy answers.")] = 0.7,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 6000,
    minutes: Annotated[float, typer.Option(min=0, help="End the schedule by then; 0: no limit.")] = 0.0,
    levels: Annotated[int, typer.Option(min=1, help="Depth of unrolling: at least the depth of serving.")] = 5,
    batch_rows: Annotated[int, typer.Option(min=1, help="Dialogs a step.")] = 48,
    optimizer: Annotated[
        Literal["auto", "muon", "adamw"], typer.Option(help="auto: muon for EAGLE-3 on cuda.")
    ] = "auto",
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak; 0: 0.01 for muon, 0.002 for adamw.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of everything drawn.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Let a model write dialogs and train a draft head on them; started again, it resumes."""
    place = _device(device)
    on_gpu = place == "cuda"
    if optimizer == "auto":
        optimizer = "muon" if on_gpu and kind == "eagle3" else "adamw"
    step_options = StepOptions(
        optimizer=optimizer,
        learning_rate=learning_rate or (0.01 if optimizer == "muon" else 0.002),
        num_steps=steps,
        max_seconds=minutes * 60 or math.inf,
        batch_rows=batch_rows,
        num_levels=levels,
        loss_chunk=4096 if on_gpu else 512,
        seed=seed,
    )
    options = TrainOptions(
        model=resolve_model(model),
        out=out,
        work=work or out / "work",
        kind=DraftHeadKind(kind),
        feature_layers=_layers(feature_layers),
        intermediate_size=intermediate_size,
        draft_vocab_size=draft_vocab,
        num_batches=batches,
        batch_dialogs=batch_dialogs or (4096 if on_gpu else 32),
        dialog_len=dialog_len,
        greedy_share=greedy_share,
        steps=step_options,
        device=place,
        dtype=_dtype(dtype, place),
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        run_training(options, _BarReport(bars))
    typer.echo(out)


@app.command("eval")
def evaluate_head(
    model: Annotated[str, typer.Option(help="A known name, a model directory or a .gguf file.")] = "smollm2-135m",
    head: Annotated[Path | None, typer.Option(help="Folder of the head; the one beside the model.")] = None,
    prompts: Annotated[Path, typer.Option(help="JSON lines of kind and messages.")] = HELD_OUT_PROMPTS,
    kinds: Annotated[str, typer.Option(help="Such as chat,code: only these.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Prompts of each kind; 0: all.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens an answer.")] = 256,
    temperatures: Annotated[str, typer.Option(help="One table each.")] = "0,1",
    trees: Annotated[bool, typer.Option(help="Measure trees too (slow on a CPU).")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of the answers drawn above temperature 0.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Accept length on held-out prompts: chains S1-S5, trees, acceptance by depth."""
    place = _device(device)
    number_type, wanted_temperatures = _dtype(dtype, place), _numbers(temperatures)
    path = resolve_model(model)
    folder = head or draft_head_path(path)
    if folder is None:
        raise InvalidRequestError("head", f"no draft head lies beside {path}")
    options = EvalOptions(
        model=path,
        head=folder,
        prompts=prompts,
        kinds=tuple(kind for kind in kinds.split(",") if kind),
        limit=limit,
        max_new_tokens=max_new_tokens,
        temperatures=wanted_temperatures,
        seed=seed,
        device=place,
        dtype=number_type,
    )
    console = Console(stderr=True)
    with console.status("starting") as status:
        results = evaluate(options if trees else replace(options, shapes=()), status.update)
    for figures in results:
        Console().print(_table(figures))
    if json_file is not None:
        json_file.write_text(json.dumps([figures.to_json() for figures in results], indent=2) + "\n")


@app.command()
def overlap(
    work: Annotated[Path, typer.Option(help="Working folder of a training run.")],
    model: Annotated[str, typer.Option(help="The model that run trained for.")] = "smollm2-135m",
    prompts: Annotated[Path, typer.Option(help="JSON lines of kind and messages.")] = HELD_OUT_PROMPTS,
    ngram: Annotated[int, typer.Option(min=1, help="Tokens of an n-gram.")] = 13,
) -> None:
    """Share of the n-grams of held-out prompts that a run's dialogs hold."""
    table = Table("kind", "prompts", "mean", "largest", title=f"{ngram}-grams of prompts found in {work}")
    for kind, shares in prompt_overlap(work, resolve_model(model), prompts, ngram).items():
        table.add_row(kind, str(len(shares)), f"{sum(shares) / len(shares):.3f}", f"{max(shares):.3f}")
    Console().print(table)


class _BarReport:
    """A `TrainReport` on progress bars."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = bars.add_task("starting", total=None)

    def phase(self, name: str) -> None:
        self._bars.reset(self._task, description=name, total=None)

    def dialogs_written(self, done: int, total: int) -> None:
        self._bars.update(self._task, completed=done, total=total)

    def stepped(self, progress: TrainProgress) -> None:
        agreement = " ".join(f"{share:.2f}" for share in progress.agreement)
        text = f"step {progress.step}, loss {progress.cross_entropy[0]:.3f}, agreement by depth {agreement}"
        self._bars.update(self._task, description=text, completed=progress.share_done * 100, total=100)


def _table(figures: TemperatureFigures) -> Table:
    kinds = list(figures.by_kind)
    table = Table("", *kinds, "mean", title=f"accept length, temperature {figures.temperature:g}")
    for label in next(iter(figures.by_kind.values())).by_shape:
        cells = [f"{figures.by_kind[kind].by_shape[label].accept_length:.2f}" for kind in kinds]
        table.add_row(label, *cells, f"{mean_accept_length(figures.by_kind, kinds, label):.2f}")
    depths = len(next(iter(figures.by_kind.values())).depth_acceptance)
    for depth in range(depths):
        cells = [f"{figures.by_kind[kind].depth_acceptance[depth]:.2f}" for kind in kinds]
        table.add_row(f"accepted at depth {depth + 1}", *cells, "")
    return table


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise InvalidRequestError("device", f"{name!r} is not auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidRequestError("device", "cuda: torch sees no GPU")
    return name


def _dtype(name: str, device: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    if name not in known:
        raise InvalidRequestError("dtype", f"{name!r} is not auto, float32 or bfloat16")
    return known[name]


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InvalidRequestError("feature_layers", f"{text!r} is no list of layer numbers") from error


def _numbers(text: str) -> tuple[float, ...]:
    try:
        values: Sequence[float] = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequestError("temperatures", f"{text!r} is no list of numbers") from error
    if not all(0 <= value < math.inf for value in values):
        raise InvalidRequestError("temperatures", f"{text!r} holds a value below 0")
    return tuple(values)
