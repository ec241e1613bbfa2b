"""The folders and who may import whom (docs/architecture.md)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "graftline"
FOLDERS = ("proto", "kernels", "engine", "kv_transfer", "prefill_server", "decode_server", "router", "bench")
# These know nothing of ours but errors and may be imported by all.
COMMON = {"errors", "garbage", "metrics", "tracing", "wakeup", "write_guard"}
ALLOWED = {
    "proto": set(),
    "kernels": set(),
    "engine": {"kernels"},
    "kv_transfer": {"proto"},
    "worker": {"engine", "kv_transfer", "proto"},
    "prefill_server": {"engine", "kv_transfer", "proto", "worker"},
    "decode_server": {"engine", "kv_transfer", "proto", "worker"},
    "router": {"proto"},
    "client": {"proto"},
}


def sources(folder: str) -> Iterator[Path]:
    return (path for path in sorted((PACKAGE / folder).rglob("*.py")) if "__pycache__" not in path.parts)


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module or ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_linked_and_have_no_init(folder: str) -> None:
    assert (PACKAGE / folder).is_symlink()
    assert (PACKAGE / folder).resolve() == ROOT / folder
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_follow_the_table(folder: str) -> None:
    found = list(sources(folder))
    assert found, f"no source in {folder}"
    for path in found:
        for module in imported_modules(path):
            if module.startswith("graftline."):
                target = module.split(".")[1]
                assert target in ALLOWED[folder] | COMMON | {folder}, f"{path} imports {module}"


@pytest.mark.parametrize("folder", ["router", "client", "proto"])
def test_torch_stays_out_of_the_router(folder: str) -> None:
    modules = [
        "graftline." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in sources(folder)
        if path.name not in ("__init__.py", "generate.py")
    ]
    code = f"import sys\nfor name in {modules!r}:\n    __import__(name)\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_pickle_anywhere() -> None:
    """CASES Z01: nothing that came over a wire may be unpickled."""
    for folder in (*FOLDERS, "worker", "client"):
        for path in sources(folder):
            text = path.read_text()
            for word in ("pickle", "recv_pyobj", "weights_only=False", "marshal", "recv_object_list"):
                assert word not in text, f"{path} speaks of {word}"
