"""Checks and times every GPU kernel: `python -m graftline.bench.gpu_kernels --out results/gpu_kernels.json`.

Needs one GPU for at most `--seconds`. Items run in child processes: checks and compilation in several at once, timings
one by one afterwards. A kernel that breaks the device ends its child alone; the items behind it go on in a new one.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graftline.bench.gpu_kernel_items import Item

_PRINTED_ERROR = 400
_QUICK_S = 35.0
_CHECKS_SHARE = 0.25  # of the time, for the first checks; the others get as much at least
# Parts of names: what rounds of an 8B model use.
_FIRST_CHECKS = (
    "tree attention bf16 32/8x128 page 16", "4096->4096", "place_qkv bf16 dim 128", "norms bf16 4096", "sample 151936",
    "7x151936", "captured round",
)  # fmt: skip
_FIRST_TIMES = (
    "copy", "layers 8B", "choices rows 16 of 128256", "choices rows 64 of 128256", "choices rows 1 of 128256",
    "attention 32/8x128 batch 1 context 1024", "attention 32/8x128 batch 16", "attention 32/8x128 batch 4",
)  # fmt: skip


def items_of(phase: str) -> list[Item]:
    """The items of `checks` or `times`."""
    if phase == "checks":
        from graftline.bench.gpu_kernel_checks import list_checks

        return list_checks()
    from graftline.bench.gpu_kernel_layers import list_layers
    from graftline.bench.gpu_kernel_times import list_timings

    return list_timings() + list_layers()


# --- in a child -------------------------------------------------------------------------------------------------------


def run_item(item: Item, warm_up: bool) -> dict[str, Any]:
    """What an item found, or why it failed."""
    started = time.perf_counter()
    try:
        found = item.run(warm_up)
        failed = "error" in found and not found["error"] <= found["bound"]
        found["status"] = "FAIL" if failed else "PASS"
    except Exception as error:
        found = {"status": "FAIL", "exception": f"{type(error).__name__}: {error}"}
    return found | {"wall_s": round(time.perf_counter() - started, 2)}


def child_main(phase: str, warm_up: bool) -> None:
    """Runs the items whose indexes come line by line, and answers with a line of JSON each."""
    import torch

    items = items_of(phase)
    with torch.inference_mode():
        for line in sys.stdin:
            answer = run_item(items[int(line)], warm_up)
            print(json.dumps(answer), flush=True)
            if torch.cuda.is_available():
                try:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                except RuntimeError:
                    return  # the device refuses this process from here on


# --- in the parent ----------------------------------------------------------------------------------------------------


class Child:
    """A process that runs items one after the other."""

    def __init__(self, phase: str, warm_up: bool) -> None:
        command = [sys.executable, "-m", "graftline.bench.gpu_kernels", "--child", phase]
        self._process = subprocess.Popen(
            [*command, *(["--warm-up"] if warm_up else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-20:], line.rstrip()]

    def ask(self, index: int) -> dict[str, Any] | None:
        """The answer to an item; None when the child was gone before it began; a failure when it died on it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{index}\n")
            self._process.stdin.flush()
        except OSError:
            return None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if self._process.wait(10) == 0:
            return None
        return {"status": "FAIL", "exception": "the process died: " + " | ".join(self._errors[-6:])}

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait(10)


def run_phase(
    phase: str, warm_up: bool, num_children: int, deadline: float, indexes: Sequence[int] | None = None
) -> dict[str, dict[str, Any]]:
    """Answers by item name; items that the time does not suffice for are left out."""
    items = items_of(phase)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(items)) if indexes is None else indexes:
        waiting.put(index)
    answers: dict[str, dict[str, Any]] = {}
    children: set[Child] = set()
    lock = threading.Lock()

    def serve() -> None:
        child: Child | None = None
        index: int | None = None
        while time.monotonic() < deadline:
            if child is None:
                child = Child(phase, warm_up)
                with lock:
                    children.add(child)
            if index is None:
                try:
                    index = waiting.get_nowait()
                except queue.Empty:
                    break
            answer = child.ask(index)
            if answer is None:
                child = None
                continue
            if time.monotonic() >= deadline:
                break
            answers[items[index].name] = answer
            if not warm_up:
                print(describe(phase, items[index].name, answer), flush=True)
            elif answer["status"] == "FAIL":
                print(f"FAIL while warming up {items[index].name}: {answer['exception'][:_PRINTED_ERROR]}", flush=True)
            index = None

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(num_children)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    with lock:
        for child in children:
            child.stop()
    missing = len(items if indexes is None else indexes) - len(answers)
    if missing:
        print(f"NOT RUN: {missing} items of phase {phase}, the time was over", flush=True)
    return answers


def describe(phase: str, name: str, answer: dict[str, Any]) -> str:
    """One line for a person."""
    if "exception" in answer:
        return f"FAIL {name}: {answer['exception'][:_PRINTED_ERROR]}"
    if phase == "checks":
        figures = f"error {answer['error']:.2e} (bound {answer['bound']:.0e})"
        extra = {key: value for key, value in answer.items() if key.startswith("top_p_rows")}
        return f"{answer['status']} {name}: {figures}{' ' + json.dumps(extra) if extra else ''}"
    if "microseconds" in answer:
        figures = ", ".join(f"{key} {value:.1f} us" for key, value in answer["microseconds"].items())
        differing = f"; {answer['error']:.0f} elements DIFFER" if answer.get("error") else ""
        read = f"; {answer['bytes'] / 1e6:.1f} MB" if "bytes" in answer else ""
        return f"TIME {name}: {figures}{read}{differing}"
    if "torch_seconds" in answer:
        return f"TIME {name}: " + ", ".join(
            f"{label} {_speed(answer, answer[key])}"
            for label, key in (("triton", "seconds"), ("best", "best_seconds"), ("torch", "torch_seconds"))
        ) + f"; best {answer['best']}, chosen {answer['chosen']}"  # fmt: skip
    if "tiling" in answer:
        others = ", ".join(f"{label} {_speed(answer, s)}" for label, s in answer["other_seconds"].items())
        return f"TIME {name}: {_speed(answer, answer['seconds'])} with {answer['tiling']}; {others}"
    return f"TIME {name}: {json.dumps(answer)}"


def _speed(answer: dict[str, Any], seconds: float | str | None) -> str:
    """Microseconds and how many bytes a second."""
    if not isinstance(seconds, float):
        return f"({seconds})"
    return f"{1e6 * seconds:.1f} us {answer['bytes'] / seconds / 1e9:.0f} GB/s"


def main() -> None:
    """Measures and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, help=f"at most; 90, or {_QUICK_S:.0f} with --quick")
    parser.add_argument("--quick", action="store_true", help="only what rounds of an 8B model use")
    parser.add_argument("--children", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--only", default="", help="items whose name holds this")
    parser.add_argument("--child", choices=("checks", "times"), help=argparse.SUPPRESS)
    parser.add_argument("--warm-up", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child_main(arguments.child, arguments.warm_up)
        return
    if arguments.out is None:
        parser.error("--out is needed")
    seconds = arguments.seconds or (_QUICK_S if arguments.quick else 90.0)
    found = measure(arguments.only, arguments.children, time.monotonic() + seconds, arguments.quick)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure(only: str, num_children: int, deadline: float, is_quick: bool = False) -> dict[str, Any]:
    """All phases: the first checks, compilation for the timings and the timings, then the other checks.

    Args:
        only: items whose name holds this.
        is_quick: no other checks, and the first timings alone.
    """
    started = time.monotonic()
    budget = deadline - started
    names = {phase: [item.name for item in items_of(phase)] for phase in ("checks", "times")}
    first, others = _split(names["checks"], only, _FIRST_CHECKS)
    timed, later = _split(names["times"], only, _FIRST_TIMES)
    checks = run_phase("checks", False, num_children, started + _CHECKS_SHARE * budget, first)
    checked = time.monotonic()
    indexes = timed if is_quick else timed + later
    run_phase("times", True, num_children, checked + (deadline - checked) / 2, indexes)
    warm = time.monotonic()
    last = deadline if is_quick or not others else deadline - _CHECKS_SHARE * budget
    times = run_phase("times", False, 1, last, indexes)
    measured = time.monotonic()
    if not is_quick:
        checks |= run_phase("checks", False, num_children, deadline, others)
    failures = [name for name, answer in (checks | times).items() if answer["status"] == "FAIL"]
    copy = times.get("copy", {}).get("copy_gb_per_s")
    print(
        f"{len(checks)} checks, {len(times)} timings, {len(failures)} failures; copy {copy} GB/s; first checks "
        f"{checked - started:.0f} s, compilation {warm - checked:.0f} s, timings {measured - warm:.0f} s, other "
        f"checks {time.monotonic() - measured:.0f} s"
    )
    for name in failures:
        print(f"FAILED: {name}")
    return {"checks": checks, "times": times, "copy_gb_per_s": copy, "failures": failures}


def _split(names: Sequence[str], only: str, first: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indexes of names that hold `only`: those that hold one of `first` too, in its order, and the rest."""
    wanted = [index for index, name in enumerate(names) if only in name]
    front = [index for part in first for index in wanted if part in names[index]]
    front = list(dict.fromkeys(front))
    return front, [index for index in wanted if index not in front]


if __name__ == "__main__":
    main()
