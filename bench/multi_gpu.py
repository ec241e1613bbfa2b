"""Everything that is measured on several GPUs of one host, in sections; two unless `--gpus` says more.

`python -m graftline.bench.multi_gpu --out results/multi_gpu.json --seconds 530 --model FILE.gguf` runs what fits of the
sections, the most telling first; with `--sections` those that are named. Every section is a process of its own with a
bound of its own, so that a crash or a hang costs one section; `--out` holds what was found so far. `--device cpu` tries
the logic with tiny models, gloo for NCCL.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from graftline.bench.gpu import SHARE
from graftline.bench.gpu_steps import Steps, run_bounded, write_json
from graftline.bench.machine import command_line, machine_facts
from graftline.bench.multi_gpu_configs import TINY
from graftline.bench.multi_gpu_speculation import PAIRS, stages_of

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """What sections are told.

    Attributes:
        model: name, directory or GGUF file of a model with weights; empty: a tiny random one.
        device: "cuda" for GPUs from 0 on, or "cpu".
        scratch: for files that need not last.
        pairs: of engines that are measured, in this order.
        share: of simulated drafts that are right, each.
        gpus: how many devices there are.
    """

    model: str
    device: str
    scratch: Path
    pairs: Sequence[str] = PAIRS
    share: float = SHARE
    gpus: int = 2

    @property
    def devices(self) -> tuple[str, ...]:
        """Of all stages: a prefill's from the first on, a decode's up to the last."""
        return tuple("cpu" if self.device == "cpu" else f"cuda:{index}" for index in range(self.gpus))


def _parity(steps: Steps, place: Place) -> None:
    from graftline.bench.multi_gpu_parity import measure_parity

    measure_parity(steps, *_model_and_head(place), place.devices)


def _handoff(steps: Steps, place: Place) -> None:
    from graftline.bench.gpu_models import LLAMA_8B, write_dummy_model
    from graftline.bench.multi_gpu_handoff import CPU_PROMPTS, GPU_PROMPTS, measure_handoffs

    is_cpu = place.device == "cpu"
    prompts = CPU_PROMPTS if is_cpu else GPU_PROMPTS
    shapes = TINY if is_cpu else {**LLAMA_8B, "max_position_embeddings": max(prompts) + 64}
    model = write_dummy_model(place.scratch / "handoff", shapes)
    measure_handoffs(steps, model, place.devices[:2], prompts)


def _large(steps: Steps, place: Place) -> None:
    from graftline.bench.gpu_configs import usual_tree
    from graftline.bench.gpu_models import LLAMA_8B, write_successor_pair
    from graftline.bench.multi_gpu_load import Load
    from graftline.bench.multi_gpu_speculation import measure_speculation

    shapes = TINY if place.device == "cpu" else LLAMA_8B
    model, head = write_successor_pair(place.scratch / "successors", place.share, shapes)
    steps.note("simulated: drafts that are right, each", place.share)
    load = Load.small() if place.device == "cpu" else Load.of_gpu(prompt_len=1024)
    measure_speculation(steps, "8B shapes", model, head, place.devices, load, usual_tree(place.device), place.pairs)


def _long(steps: Steps, place: Place) -> None:
    from graftline.bench.gpu_configs import usual_tree
    from graftline.bench.gpu_models import LLAMA_8B, write_successor_pair
    from graftline.bench.multi_gpu_load import Load
    from graftline.bench.multi_gpu_speculation import measure_speculation

    length = 16384
    shapes = TINY if place.device == "cpu" else {**LLAMA_8B, "max_position_embeddings": length + 1024}
    model, head = write_successor_pair(place.scratch / "long-successors", place.share, shapes)
    load = Load.small() if place.device == "cpu" else Load.of_long_prompts(length)
    measure_speculation(
        steps, "8B shapes, 16k", model, head, place.devices, load, usual_tree(place.device), place.pairs
    )


def _small(steps: Steps, place: Place) -> None:
    from graftline.bench.gpu_configs import usual_tree
    from graftline.bench.gpu_parity import parity_prompts
    from graftline.bench.multi_gpu_load import Load
    from graftline.bench.multi_gpu_speculation import measure_speculation
    from graftline.engine.models.checkpoint import open_checkpoint

    model, head = _model_and_head(place)
    texts = parity_prompts(open_checkpoint(model)) if place.model else ()
    load = Load.small() if place.device == "cpu" else Load.of_texts(512, texts)
    measure_speculation(steps, "default model", model, head, place.devices, load, usual_tree(place.device), place.pairs)


def _model_and_head(place: Place) -> tuple[Path, Path | None]:
    from graftline.bench.gpu_models import write_successor_pair
    from graftline.engine.model_fetch import draft_head_path, resolve_model

    if place.model:
        model = resolve_model(place.model)
        return model, draft_head_path(model)
    return write_successor_pair(place.scratch / "tiny", place.share, TINY)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run.

    Attributes:
        seconds: after which it is killed, with what it started; its own steps stop beginning a little earlier.
    """

    seconds: float
    run: Callable[[Steps, Place], None]


SECTIONS = {
    "parity": Section(110.0, _parity),
    "handoff": Section(100.0, _handoff),
    "large": Section(200.0, _large),
    "long": Section(200.0, _long),
    "small": Section(150.0, _small),
}
"""In order of importance."""


def run_sections(
    names: Sequence[str], out: Path, seconds: float, model: str, device: str, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs sections one after the other and keeps `out` up to date.

    Args:
        options: further ones of a section's process.
    """
    deadline_s = time.monotonic() + seconds
    found: dict[str, Any] = {
        "machine": msgspec.to_builtins(machine_facts()),
        "command": command_line(),
        "model": model or "tiny",
        "device": device,
        "sections": {},
    }
    with tempfile.TemporaryDirectory(prefix="graftline-multi-gpu-") as folder:
        for name in names:
            bound_s = min(SECTIONS[name].seconds, deadline_s - time.monotonic())
            if bound_s <= 2 * _GRACE_S:
                found["sections"][name] = {"ending": "not begun: out of time"}
            else:
                part = Path(folder, f"{name}.json")
                words = ["--section", name, "--out", str(part), "--seconds", str(bound_s), "--model", model]
                words += ["--device", device, "--scratch", folder, *options]
                command = [sys.executable, "-m", "graftline.bench.multi_gpu", *words]
                found["sections"][name] = run_bounded(command, part, bound_s)
            write_json(out, found)
    return found


def _failed_steps(section: dict[str, Any]) -> list[str]:
    found = section.get("found") or {}
    return [step for step, value in found.items() if isinstance(value, dict) and "error" in value]


def main() -> None:
    """Runs sections; with `--section` it is the process of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=530.0)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--model", default="", help="known name, directory or GGUF file; by default a tiny random one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--pairs",
        default=",".join(PAIRS),
        help="engines of the last three sections, in this order: eagle, plain or chain, and the decode's stages",
    )
    parser.add_argument("--gpus", type=int, default=2, help="of the host that are used, 2 to 8")
    parser.add_argument("--share", type=float, default=SHARE, help="of the 8B shapes' simulated drafts that are right")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section is not None:
        steps = Steps(arguments.out, max(1.0, arguments.seconds - _GRACE_S))
        pairs = arguments.pairs.split(",")
        place = Place(arguments.model, arguments.device, arguments.scratch, pairs, arguments.share, arguments.gpus)
        SECTIONS[arguments.section].run(steps, place)
        return
    names = [name for name in arguments.sections.split(",") if name]
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--sections: no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if not 2 <= arguments.gpus <= 8:
        parser.error(f"--gpus: {arguments.gpus} is outside [2, 8]")
    pairs = [name for name in arguments.pairs.split(",") if name]
    for pair in pairs:
        try:
            stages = stages_of(pair)
        except ValueError as error:
            parser.error(f"--pairs: {error}")
        if stages > arguments.gpus:
            parser.error(f"--pairs: {pair} on {arguments.gpus} GPUs (--gpus)")
    if not 0 <= arguments.share <= 1:
        parser.error(f"--share: {arguments.share} is outside [0, 1]")
    options = ["--pairs", ",".join(pairs), "--share", str(arguments.share), "--gpus", str(arguments.gpus)]
    found = run_sections(names, arguments.out, arguments.seconds, arguments.model, arguments.device, options)
    for name, section in found["sections"].items():
        failed = "".join(f"; failed: {step}" for step in _failed_steps(section))
        print(f"{name}: {section['ending']}{failed}")


if __name__ == "__main__":
    main()
