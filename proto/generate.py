"""Regenerates `v1/` from `graftline/v1/*.proto` (run: `make proto`).

protoc derives Python module paths from file paths; the sources lie where buf's lint wants them, so the
generated imports of sibling files are pointed at `graftline.proto.v1` afterwards.
"""

import re
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
SOURCES = sorted((ROOT / "graftline" / "v1").glob("*.proto"))
GENERATED = ROOT / "v1"


def main() -> None:
    """Runs protoc and puts its output in place."""
    with tempfile.TemporaryDirectory() as scratch:
        plugins = Path(sys.executable).parent
        arguments = [
            "protoc",
            f"-I{ROOT}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--python_out={scratch}",
            f"--grpc_python_out={scratch}",
            f"--mypy_out={scratch}",
            f"--mypy_grpc_out={scratch}",
            *(str(source) for source in SOURCES),
        ]
        if protoc.main(arguments) != 0:
            sys.exit("protoc failed")
        GENERATED.mkdir(exist_ok=True)
        for stale in GENERATED.glob("*_pb2*"):
            stale.unlink()
        for module in sorted(Path(scratch, "graftline", "v1").iterdir()):
            text = re.sub(r"\bgraftline\.v1\b(?= import)", "graftline.proto.v1", module.read_text())
            text = re.sub(r"\bgraftline\.v1\.(\w+_pb2)\b", r"graftline.proto.v1.\1", text)
            (GENERATED / module.name).write_text(text)
        (GENERATED / "__init__.py").touch()
    shutil.rmtree(GENERATED / "__pycache__", ignore_errors=True)


if __name__ == "__main__":
    main()
