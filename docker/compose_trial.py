"""Builds the images, brings compose.yaml up for real, uses it, breaks it, takes it down: `make test-compose`.

Runs a Docker engine of its own (Debian's packages, root) in a scratch folder and leaves nothing behind. Needs no
registry of images: the base is made by debootstrap, Prometheus comes from Debian. Variables:
    BASE_IMAGE, PROMETHEUS_IMAGE   images to be pulled instead
    TORCH_INDEX                    index with CPU builds of torch; by default pip's own settings decide
    TRIAL_FOLDER                   keeps engine and images for another run; TRIAL_SKIP_BUILD=1 then uses them
    TRIAL_LOAD_S, TRIAL_PICTURES, TRIAL_PICTURE_MINUTES   more load, and pictures of the dashboards
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FILES = ("compose.yaml", "compose.two-decodes.yaml", "compose.trial.yaml")
PACKAGES = {"dockerd": "docker.io", "debootstrap": "debootstrap", "iptables": "iptables"}
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
HTTP = "http://127.0.0.1:8000"
PROJECT = "graftline"
BUILD_S, UP_S, ANSWER_S = 2400, 600, 300
_BEGIN_S = time.monotonic()


class TrialError(Exception):
    """A step did not do what it should."""


def say(text: str) -> None:
    """A line with the seconds since the start."""
    print(f"{time.monotonic() - _BEGIN_S:7.1f} s  {text}", flush=True)


def run(command: Sequence[str | Path], timeout_s: float, **environment: str) -> str:
    """Output of a command. Raises TrialError with the end of what it said."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise TrialError(f"{' '.join(str(part) for part in command)[:300]} ended with {done.returncode}:\n{said}")
    return done.stdout


class Engine:
    """A Docker engine of the trial's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/docker.sock"
        self._compose = Path(sys.executable).parent / "docker-compose"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs dockerd while the block is open."""
        arguments = ["--data-root", "data", "--exec-root", "exec", "--pidfile", "docker.pid"]
        paths = [part if part.startswith("--") else str(self.folder / part) for part in arguments]
        with (self.folder / "dockerd.log").open("wb") as log:
            process = subprocess.Popen(["dockerd", *paths, "--host", self.host], stdout=log, stderr=log)
        try:
            self._wait_until_up(process)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            # Its default network namespace stays mounted.
            subprocess.run(["umount", self.folder / "exec" / "netns" / "default"], capture_output=True, check=False)

    def _wait_until_up(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(TrialError):
                self.docker("info", timeout_s=10)
                return
            time.sleep(0.5)
        raise TrialError(f"dockerd did not start; see {self.folder / 'dockerd.log'}")

    def docker(self, *arguments: str | Path, timeout_s: float = 120, **environment: str) -> str:
        """Runs the client."""
        return run(["docker", "--host", self.host, *arguments], timeout_s, **environment)

    def compose(self, *arguments: str, timeout_s: float = 120, **environment: str) -> str:
        """Runs Compose over the trial's files."""
        files = [part for file in FILES for part in ("-f", str(HERE / file))]
        return run([self._compose, *files, *arguments], timeout_s, DOCKER_HOST=self.host, **environment)

    def has_image(self, name: str) -> bool:
        """Whether an image is there."""
        return bool(self.docker("images", "--quiet", name).strip())


def install_packages() -> None:
    """Brings the engine and debootstrap."""
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if missing:
        say(f"installing {', '.join(missing)}")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-qq"], 300, **quiet)
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], 600, **quiet)


def base_image(engine: Engine) -> str:
    """The image that Dockerfiles start from."""
    if chosen := os.environ.get("BASE_IMAGE"):
        return chosen
    name = "graftline-trial-base:bookworm"
    if not engine.has_image(name):
        say("making a base image with debootstrap")
        root = engine.folder / "rootfs"
        wanted = "--include=python3,python3-venv,python3-pip,ca-certificates"
        if not (root / "etc" / "os-release").exists():
            run(["debootstrap", "--variant=minbase", wanted, "bookworm", root], 1200)
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
        archive = engine.folder / "base.tar"
        run(["tar", "-C", root, "--exclude=./var/cache/apt/archives/*", "-cf", archive, "."], 300)
        settings = f"ENV PIP_CERT={CERTIFICATES} SSL_CERT_FILE={CERTIFICATES} PIP_DEFAULT_TIMEOUT=180"
        engine.docker("import", "--change", settings, archive, name, timeout_s=300)
        archive.unlink()
    return name


def prometheus_image(engine: Engine, base: str) -> str:
    """An image with Prometheus."""
    if chosen := os.environ.get("PROMETHEUS_IMAGE"):
        return chosen
    name = "graftline-trial-prometheus:bookworm"
    if not engine.has_image(name):
        say("making an image with Debian's Prometheus")
        lines = [
            f"FROM {base}",
            "RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus"
            " && install -d -o nobody /prometheus",
            "USER nobody",
        ]
        folder = engine.folder / "prometheus-image"
        folder.mkdir(exist_ok=True)
        (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
        engine.docker("build", "--network", "host", "-t", name, folder, timeout_s=900, DOCKER_BUILDKIT="0")
    return name


@contextlib.contextmanager
def torch_arguments() -> Iterator[list[str]]:
    """Build arguments for the torch that is installed here, whose wheel lies in the build's wheelhouse meanwhile."""
    if index := os.environ.get("TORCH_INDEX"):
        yield ["--build-arg", f"TORCH_INDEX={index}"]
        return
    requirement = f"torch=={metadata.version('torch')}"
    house = HERE / "wheelhouse"
    run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", house, requirement], 900)
    try:
        yield ["--build-arg", "TORCH_INDEX=", "--build-arg", f"TORCH={requirement}"]
    finally:
        for wheel in house.glob("torch-*.whl"):
            wheel.unlink()


def build_images(engine: Engine, base: str) -> None:
    """Router and CPU worker."""
    build(engine, base, "router", "graftline-router", [])
    with torch_arguments() as arguments:
        build(engine, base, "cpu", "graftline-worker:cpu", arguments)


def build(engine: Engine, base: str, name: str, tag: str, arguments: Sequence[str]) -> None:
    """One image."""
    say(f"building {tag}")
    own = ["build", "--network", "host", "--build-arg", f"BASE_IMAGE={base}", *arguments]
    place = ["-f", HERE / f"Dockerfile.{name}", "-t", tag, ROOT]
    engine.docker(*own, *place, timeout_s=BUILD_S, DOCKER_BUILDKIT="0")
    say(f"  {image_facts(engine, tag)}")


def image_facts(engine: Engine, tag: str) -> str:
    """Size, user, and that neither compiler nor (router) torch is inside."""
    (facts,) = json.loads(engine.docker("inspect", tag))
    user = facts["Config"]["User"]
    check = (
        "import importlib.util as u, shutil; print('torch' if u.find_spec('torch') else 'no torch', "
        "'compiler' if shutil.which('gcc') or shutil.which('cc') else 'no compiler')"
    )
    inside = engine.docker("run", "--rm", "--network", "none", "--entrypoint", "python3", tag, "-c", check).strip()
    if user in ("", "0", "root") or "no compiler" not in inside or ("router" in tag and "no torch" not in inside):
        raise TrialError(f"{tag}: user {user!r}, {inside}")
    return f"{tag}: {facts['Size'] / 1e6:.0f} MB, user {user}, {inside}"


def token() -> str:
    """What clients show."""
    return (HERE / "secrets" / "token").read_text().strip()


def chat(text: str, max_tokens: int, *, stream: bool = False, bearer: str | None = None) -> Any:
    """Opens a chat completion; raises urllib's errors."""
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {bearer or token()}"}
    request = urllib.request.Request(f"{HTTP}/v1/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=ANSWER_S)


def answer(text: str, max_tokens: int) -> str:
    """The text of a completion."""
    with chat(text, max_tokens) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def check_answers() -> None:
    """A completion with the token, none with another."""
    text = answer("What is the capital of France?", 24)
    say(f"an answer through the published port: {text!r}")
    if "Paris" not in text:
        raise TrialError(f"an odd answer: {text!r}")
    try:
        chat("Hello", 1, bearer="wrong").close()
    except urllib.error.HTTPError as error:
        if error.code == 401:
            return
        raise
    raise TrialError("a wrong token was accepted")


@contextlib.contextmanager
def load(num_clients: int) -> Iterator[None]:
    """Completions one after the other while the block is open; a failed one fails the trial."""
    stop = threading.Event()

    def client(number: int) -> int:
        count = 0
        while not stop.is_set():
            answer(f"Tell me {count % 5 + 2} facts about the number {number * 100 + count}.", 48)
            count += 1
            if count % 7 == 0:
                with contextlib.suppress(urllib.error.HTTPError):
                    chat("too many", -1).close()
        return count

    with ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(client, number) for number in range(num_clients)]
        try:
            yield
        finally:
            stop.set()
    say(f"  {sum(done.result() for done in clients)} completions under load")


class Containers:
    """What Compose runs, by service."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ids(self, service: str) -> list[str]:
        """Running containers of a service."""
        labels = [f"label=com.docker.compose.project={PROJECT}", f"label=com.docker.compose.service={service}"]
        return self._engine.docker("ps", "-q", "--filter", labels[0], "--filter", labels[1]).split()

    def facts(self, container: str) -> dict[str, Any]:
        """`docker inspect`."""
        return dict(json.loads(self._engine.docker("inspect", container))[0])

    def inside_address(self, container: str) -> str:
        """Its address on the network `inside`, which this host can reach."""
        return str(self.facts(container)["NetworkSettings"]["Networks"][f"{PROJECT}_inside"]["IPAddress"])

    def is_healthy(self, container: str) -> bool:
        """What its health check says."""
        state = self.facts(container)["State"]
        return bool(state["Running"]) and state.get("Health", {}).get("Status") == "healthy"


def ask_dashboards(containers: Containers) -> None:
    """Every question of dashboards and alerts, while load runs."""
    (prometheus,) = containers.ids("prometheus")
    command: list[str | Path] = [sys.executable, HERE / "grafana" / "dashboard_live.py"]
    command += [f"http://{containers.inside_address(prometheus)}:9090", "--span", "30s", "--wait-s", "180"]
    command += ["--minutes", os.environ.get("TRIAL_PICTURE_MINUTES", "3")]
    if pictures := os.environ.get("TRIAL_PICTURES"):
        command += ["--draw", pictures]
    with load(3):
        if seconds := float(os.environ.get("TRIAL_LOAD_S", "0")):
            time.sleep(seconds)
        say(run(command, 400).strip().replace("\n", "\n           "))


def metric(address: str, name: str) -> float:
    """The sum of a metric's samples at a metrics port."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def serving_decode(containers: Containers) -> str:
    """The container that runs the only request there is."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for container in containers.ids("decode"):
            if metric(f"{containers.inside_address(container)}:9100", "graftline_worker_running_requests") > 0:
                return container
        time.sleep(0.05)
    raise TrialError("no decode runs the request")


def kill_a_decode(containers: Containers) -> None:
    """A stream whose decode is killed goes on elsewhere and says what it would have said."""
    prompt, length = "Write a long story about a gardener who grafts apple trees.", 160
    expected = answer(prompt, length)
    before = metric("127.0.0.1:8000", "graftline_router_streams_resumed_total")
    parts: list[str] = []
    killed_after: int | None = None
    container = ""
    with chat(prompt, length, stream=True) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            parts += [choice["delta"].get("content") or "" for choice in choices]
            if killed_after is None and len(parts) >= 5:
                container = serving_decode(containers)
                killed_after = len(parts)
                os.kill(int(containers.facts(container)["State"]["Pid"]), signal.SIGKILL)
    resumed = metric("127.0.0.1:8000", "graftline_router_streams_resumed_total") - before
    if "".join(parts) != expected or resumed != 1:
        raise TrialError(f"killed after {killed_after} messages, resumed {resumed:.0f}: {''.join(parts)!r}")
    say(f"a decode killed after {killed_after} messages: stream resumed, all {len(expected)} characters are right")
    deadline = time.monotonic() + UP_S
    while not containers.is_healthy(container):
        if time.monotonic() > deadline:
            raise TrialError("the killed decode did not come back")
        time.sleep(1)
    say("the killed decode was restarted and is healthy")


def check_down(engine: Engine) -> None:
    """Takes everything down; nothing of it is left."""
    begin_s = time.monotonic()
    engine.compose("--profile", "cpu", "down", "--volumes", timeout_s=300)
    left = engine.docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={PROJECT}").split()
    left += engine.docker("network", "ls", "-q", "--filter", f"label=com.docker.compose.project={PROJECT}").split()
    left += engine.docker("volume", "ls", "-q", "--filter", f"label=com.docker.compose.project={PROJECT}").split()
    if left:
        raise TrialError(f"left after down: {left}")
    say(f"down in {time.monotonic() - begin_s:.1f} s; nothing is left")


def use(engine: Engine, prometheus: str) -> None:
    """Up, answers, dashboards, a loss, down."""
    containers = Containers(engine)
    say("up")
    try:
        engine.compose("up", "--detach", "--no-build", "--wait", timeout_s=UP_S, PROMETHEUS_IMAGE=prometheus)
        for service, number in (("prefill", 1), ("decode", 2), ("router", 1), ("prometheus", 1)):
            ids = containers.ids(service)
            if len(ids) != number or not all(containers.is_healthy(container) for container in ids):
                raise TrialError(f"{service}: {len(ids)} containers of {number}, or not healthy")
        say("router, prefill, two decodes (two stages each) and Prometheus are healthy")
        check_answers()
        ask_dashboards(containers)
        kill_a_decode(containers)
    except BaseException:
        print(engine.compose("logs", "--no-color", "--tail", "40"), file=sys.stderr)
        raise
    finally:
        check_down(engine)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """TRIAL_FOLDER, or a temporary one."""
    if kept := os.environ.get("TRIAL_FOLDER"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield Path(kept)
    else:
        with tempfile.TemporaryDirectory(prefix="graftline-trial-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def main() -> int:
    """The whole trial."""
    if os.geteuid() != 0:
        print("the trial runs a Docker engine of its own and needs root", file=sys.stderr)
        return 2
    # Told to stop, the trial still takes down what it brought up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        install_packages()
        with scratch_folder() as folder:
            engine = Engine(folder)
            with engine.running():
                # What an earlier trial in this folder left when it was killed.
                engine.compose("--profile", "cpu", "down", "--volumes", timeout_s=300)
                base = base_image(engine)
                prometheus = prometheus_image(engine, base)
                if not os.environ.get("TRIAL_SKIP_BUILD"):
                    build_images(engine, base)
                use(engine, prometheus)
    except (TrialError, subprocess.TimeoutExpired, OSError) as error:
        say(f"FAILED: {error}")
        return 1
    say("1 passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
