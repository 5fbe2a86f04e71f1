"""Builds the package in a temporary folder and checks what an index would get: `python benchmarks/package.py`.

It builds from a copy of the tracked files, so that nothing else can slip in. `make check` runs it.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "a fresh environment: `make check` runs it"

ROOT = Path(__file__).resolve().parents[1]


def tracked(folder: Path) -> None:
    """Copy the files that git knows, as they lie here."""
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True).stdout
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in filter(None, names.decode().split("\0")):
            if (ROOT / name).exists():
                archive.add(ROOT / name, name)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        archive.extractall(folder, filter="data")


def built(source: Path, out: Path) -> list[Path]:
    """The wheel and the source archive of a folder."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the package cannot be built:\n{done.stdout}{done.stderr}")
    return sorted(out.iterdir())


def missing(wheel: Path, source: Path) -> list[str]:
    """Files of the package's folder that the wheel lacks."""
    held = set(zipfile.ZipFile(wheel).namelist())
    own = (path for path in (source / "src" / "equipoise").rglob("*") if path.is_file())
    names = (path.relative_to(source / "src").as_posix() for path in own)
    return [name for name in names if name not in held]


def main() -> None:
    """Build, ask twine, and compare the wheel with the sources."""
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch) / "source", Path(scratch) / "dist"
        tracked(source)
        files = built(source, out)
        lacking = missing(next(path for path in files if path.suffix == ".whl"), source)
        if lacking:
            sys.exit(f"the wheel lacks {', '.join(lacking[:5])}; add them to [tool.setuptools.package-data]")
        told = subprocess.run(
            [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=False, text=True
        )
        sys.exit(told.returncode)


if __name__ == "__main__":
    main()
