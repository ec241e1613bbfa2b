"""Everything that is measured on a GPU, in sections that fit a run of ten minutes.

`python -m graftline.bench.gpu --out results/gpu.json --seconds 580` runs all sections, the most telling first;
`--sections parity,roofline` runs some. Every section is a process of its own with a bound of its own, so that a crash
or a hang costs one section; `--out` holds what was found so far at any time.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from graftline.bench.gpu_steps import Steps, end_session, ending_of, last_lines, read_json, write_json
from graftline.bench.machine import command_line, machine_facts

_POLL_S = 0.5
_STOP_GRACE_S = 3.0
_OUTPUT_LINES = 40
# From the time a script is given for its work to the end of its process.
_END_S = 8.0
MODELS = ("given", "8b")
# Drafts of the 8B shapes that are right, each: such heads reach an accept length of about 3 with chains of three.
SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Place:
    """What sections are told.

    Attributes:
        model: name, directory or GGUF file of a model with weights.
        scratch: for files that need not last.
        batches: of decode steps, and of answers beside transformers, in this order; none: those of every section.
        models: of those in MODELS, what speculation and transformers are measured with.
        share: of simulated drafts that are right, each.
    """

    model: str
    device: str
    scratch: Path
    batches: tuple[int, ...] = ()
    models: tuple[str, ...] = MODELS
    share: float = SHARE

    @property
    def has_large(self) -> bool:
        """Whether the 8B shapes are measured where both could be."""
        return self.kind != "cpu" and "8b" in self.models

    @property
    def kind(self) -> str:
        """The device without its number."""
        return self.device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run.

    Attributes:
        seconds: after which it is killed; its own steps stop beginning a little earlier.
    """

    seconds: float
    run: Callable[[Steps, Place], None]


def _kernels(steps: Steps, place: Place) -> None:
    seconds = steps.left_s
    _module(steps, "kernels", "graftline.bench.gpu_kernels", ("--seconds", f"{seconds - _END_S:.0f}"), seconds)


def _attention(steps: Steps, place: Place) -> None:
    from graftline.bench.gpu_attention import measure_attention

    measure_attention(steps, place.device)


def _parity(steps: Steps, place: Place) -> None:
    from graftline.bench.gpu_parity import measure_parity
    from graftline.engine.model_fetch import draft_head_path, resolve_model

    model = resolve_model(place.model)
    measure_parity(steps, model, draft_head_path(model), place.device)


def _roofline(steps: Steps, place: Place) -> None:
    from graftline.bench.gpu_models import LLAMA_8B, write_dummy_model
    from graftline.bench.gpu_roofline import measure_roofline

    if place.kind == "cpu":
        steps.note("8B shapes", "need a GPU")
        return
    model = write_dummy_model(place.scratch / "llama-8b", LLAMA_8B)
    measure_roofline(steps, model, place.device, batches=place.batches or (1, 4, 16, 64))


def _speculation(steps: Steps, place: Place) -> None:
    from graftline.bench.gpu_configs import Setting
    from graftline.bench.gpu_models import write_successor_pair
    from graftline.bench.gpu_parity import parity_prompts
    from graftline.bench.gpu_speculation import measure_speculation
    from graftline.engine.model_fetch import draft_head_path, resolve_model
    from graftline.engine.models.checkpoint import open_checkpoint

    if "given" in place.models:
        model = resolve_model(place.model)
        setting = Setting(model, draft_head_path(model), place.device, max_running=1)
        measure_speculation(steps, "default model", setting, parity_prompts(open_checkpoint(model), 6))
    if not place.has_large:
        return
    steps.note("8B shapes, simulated: drafts that are right, each", place.share)
    large, head = write_successor_pair(place.scratch / "successors", place.share)
    prompts = [[(31 * row + 7 * index) % 30000 for index in range(256)] for row in range(6)]
    measure_speculation(steps, "8B shapes", Setting(large, head, place.device, max_running=1), prompts)


def _transformers(steps: Steps, place: Place) -> None:
    from graftline.bench.gpu_configs import Setting
    from graftline.bench.gpu_models import LLAMA_8B, write_dummy_model
    from graftline.bench.gpu_side_by_side import measure_side_by_side
    from graftline.engine.model_fetch import draft_head_path, resolve_model

    batches = place.batches or (1, 16, 4)
    if "given" in place.models:
        model = resolve_model(place.model)
        given = Setting(model, draft_head_path(model), place.device)
        measure_side_by_side(steps, "default model", given, batches=batches)
    if place.has_large:
        large = Setting(write_dummy_model(place.scratch / "llama-8b", LLAMA_8B), None, place.device)
        measure_side_by_side(steps, "8B shapes", large, batches=batches)


def _drafter(steps: Steps, place: Place) -> None:
    from graftline.bench.gpu_configs import Setting
    from graftline.bench.gpu_drafter import measure_drafter, with_measured_lengths
    from graftline.engine.model_fetch import draft_head_path, resolve_model

    model = resolve_model(place.model)
    measure_drafter(steps, Setting(model, draft_head_path(model), place.device))
    part = steps.part("accept-length")
    command = ("draft-head", "eval", "--model", place.model, "--device", place.kind, "--limit", "4")
    options = ("--max-new-tokens", "128", "--temperatures", "0", "--json", str(part))
    _command(steps, "accept length by draft-head eval", (*command, *options), part, 60.0)
    lengths = read_json(part)
    if lengths is not None:
        steps.step("with these accept lengths", lambda: with_measured_lengths(steps.found, lengths))


def _training(steps: Steps, place: Place) -> None:
    out, part = place.scratch / "head", steps.part("trained")
    where = ("--model", place.model, "--device", place.kind)
    sizes = ("--batches", "1", "--batch-dialogs", "512", "--dialog-len", "384", "--steps", "200")
    train = ("draft-head", "train", *where, "--out", str(out), *sizes)
    _command(steps, "draft-head train", train, out / "none.json", min(75.0, steps.left_s))
    options = ("--limit", "4", "--max-new-tokens", "128", "--temperatures", "0", "--no-trees", "--json", str(part))
    measure = ("draft-head", "eval", *where, "--head", str(out), *options)
    _command(steps, "accept length of the head just trained", measure, part, 40.0)


def _transfer(steps: Steps, place: Place) -> None:
    seconds = steps.left_s
    options = ("--seconds", f"{seconds - _END_S:.0f}", "--devices", place.device)
    _module(steps, "transfer", "graftline.bench.gpu_transfer", options, seconds)


def _hybrid(steps: Steps, place: Place) -> None:
    _module(steps, "hybrid", "graftline.bench.hybrid_gpu", (), steps.left_s)


def _module(steps: Steps, name: str, module: str, options: Sequence[str], seconds: float) -> None:
    from graftline.bench.gpu_steps import run_bounded

    part = steps.part(name)
    steps.step(name, lambda: run_bounded([sys.executable, "-m", module, "--out", str(part), *options], part, seconds))


def _command(steps: Steps, name: str, words: Sequence[str], part: Path, seconds: float) -> None:
    from graftline.bench.gpu_steps import run_bounded

    steps.step(name, lambda: run_bounded([sys.executable, "-m", "graftline", *words], part, seconds), needs_s=5.0)


SECTIONS = {
    "kernels": Section(100.0, _kernels),
    "parity": Section(150.0, _parity),
    "roofline": Section(120.0, _roofline),
    "attention": Section(90.0, _attention),
    "speculation": Section(180.0, _speculation),
    "transformers": Section(260.0, _transformers),
    "transfer": Section(80.0, _transfer),
    "drafter": Section(130.0, _drafter),
    "training": Section(130.0, _training),
    "hybrid": Section(120.0, _hybrid),
}
"""In order of importance."""


def run_sections(
    names: Sequence[str],
    out: Path,
    seconds: float,
    model: str,
    device: str,
    command: Sequence[str] | None = None,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs sections one after the other and keeps `out` up to date.

    Args:
        options: further ones of a section's process.
        command: what a section's process is started with, for tests.
    """
    deadline_s = time.monotonic() + seconds
    found: dict[str, Any] = {
        "machine": msgspec.to_builtins(machine_facts()),
        "command": command_line(),
        "model": model,
        "device": device,
        "sections": {},
    }
    start = [sys.executable, "-m", "graftline.bench.gpu"] if command is None else list(command)
    with tempfile.TemporaryDirectory(prefix="graftline-gpu-") as folder:
        for name in names:
            left_s = deadline_s - time.monotonic()
            section: dict[str, Any] = {"ending": "not begun: out of time"}
            found["sections"][name] = section
            if left_s > _STOP_GRACE_S:
                bound_s = min(SECTIONS[name].seconds, left_s)
                part = Path(folder, f"{name}.json")
                words = ["--section", name, "--out", str(part), "--seconds", str(bound_s), "--model", model]
                words += ["--device", device, "--scratch", folder, *options]
                _watch([*start, *words], part, bound_s, section, lambda: write_json(out, found))
            write_json(out, found)
    return found


def _watch(
    command: Sequence[str], part: Path, bound_s: float, section: dict[str, Any], keep: Callable[[], None]
) -> None:
    """Runs a section's process; what it has found is kept all the while."""
    started = time.monotonic()
    section["ending"] = "runs"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() - started < bound_s:
                time.sleep(_POLL_S)
                _take(part, section, keep)
        finally:
            code = end_session(process)
        section["ending"] = ending_of(code)
        section["seconds"] = round(time.monotonic() - started, 1)
        if code != 0:
            section["output"] = last_lines(output, _OUTPUT_LINES)
    _take(part, section, keep)
    keep()


def _take(part: Path, section: dict[str, Any], keep: Callable[[], None]) -> None:
    found = read_json(part)
    if found is not None and found != section.get("found"):
        section["found"] = found
        keep()


def _run_one(name: str, out: Path, seconds: float, place: Place) -> None:
    """The body of a section's process."""
    import torch

    steps = Steps(out, max(1.0, seconds - _STOP_GRACE_S))
    if torch.device(place.device).type == "cuda":
        steps.note("GPU", torch.cuda.get_device_name(torch.device(place.device)))
    SECTIONS[name].run(steps, place)


def main() -> None:
    """Runs sections; with `--section` it is the process of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=580.0)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument(
        "--model", default="smollm2-135m", help="known name, directory or GGUF file, its head beside it"
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--batches", default="", help="of roofline and transformers, such as 16,4; by default their own"
    )
    parser.add_argument(
        "--models",
        default=",".join(MODELS),
        help="of speculation and transformers: given (that of --model), 8b (shapes of Llama-3.1-8B)",
    )
    parser.add_argument("--share", type=float, default=SHARE, help="of the 8B shapes' simulated drafts that are right")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        batches = tuple(int(batch) for batch in arguments.batches.split(",") if batch)
    except ValueError:
        parser.error(f"--batches: {arguments.batches!r} is not a list of numbers")
    if any(batch < 1 for batch in batches):
        parser.error(f"--batches: {arguments.batches!r} has a number below 1")
    models = tuple(name for name in arguments.models.split(",") if name)
    if unknown := [name for name in models if name not in MODELS]:
        parser.error(f"--models: no {unknown[0]!r}; there are {', '.join(MODELS)}")
    if not 0 <= arguments.share <= 1:
        parser.error(f"--share: {arguments.share} is outside [0, 1]")
    if arguments.section is not None:
        place = Place(arguments.model, arguments.device, arguments.scratch, batches, models, arguments.share)
        _run_one(arguments.section, arguments.out, arguments.seconds, place)
        return
    names = [name for name in arguments.sections.split(",") if name]
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--sections: no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    options = ["--batches", arguments.batches, "--models", arguments.models, "--share", str(arguments.share)]
    found = run_sections(names, arguments.out, arguments.seconds, arguments.model, arguments.device, options=options)
    for name, section in found["sections"].items():
        print(f"{name}: {section['ending']}, {section.get('seconds', 0)} s")


if __name__ == "__main__":
    main()
