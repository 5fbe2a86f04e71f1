"""How large the package is, how its parts hang together, and how far it is from `main` to a site's step.

    python benchmarks/before_and_after.py [--before 66c2f93] [--quick] [--out results/benchmarks]

Lines, modules and imports are read from the source. The author's names are the public names of the class `Client`, and
the attributes that its `__init__` sets. Frames are those of our files on the stack when a command
`equipoise run --method fediic` reaches a site's first step, `main` and the step included.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from earlier import environment, sources

#: packages that make pages and tables
TELLING = ("report", "studies", "study")
#: a process that prints the frames and the names, and ends at the first step
AT_FIRST_STEP = """
import json, os, sys
from importlib import import_module
from importlib.util import find_spec
home = os.path.dirname(find_spec("equipoise").origin)
new = find_spec("equipoise.contract")
Client = import_module("equipoise.contract.client" if new else "equipoise.engine.client").Client
main = import_module("equipoise.cli.app" if new else "equipoise.cli").main
def told(self, *given):
    frame, found = sys._getframe(1), ["contract/client.py:step" if new else "engine/client.py:step"]
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(home):
            found.insert(0, f"{os.path.relpath(name, home)}:{frame.f_code.co_name}")
        frame = frame.f_back
    print("told", json.dumps([found, [name for name in dir(Client) if not name.startswith("_")]]), flush=True)
    os._exit(0)
Client.step = told
settings = ["train.rounds=1", "data.phantom.images=160", "data.phantom.size=16", "augment.name='flips'"]
sys.argv = "equipoise run --method fediic --out".split() + [sys.argv[1]]
sys.argv += [f"--set={text}" for text in settings]
main()
"""


def package_of(module: str) -> str:
    """The package, or module of the root, that a dotted name lies in; nothing for the root itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "equipoise" else ""


def imported(path: Path, home: Path) -> Iterator[str]:
    """The packages that a file imports, also within functions."""
    known = {entry.stem for entry in home.iterdir()}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (package_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "equipoise":
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield package_of(node.module)


def edges_of(home: Path) -> set[tuple[str, str]]:
    """Who imports whom, between packages and modules of the root."""
    found = set()
    for path in home.rglob("*.py"):
        own = path.relative_to(home).parts[0].removesuffix(".py")
        if not own.startswith("__"):
            found |= {(own, other) for other in imported(path, home) if other and other != own}
    return found


def in_cycles(edges: set[tuple[str, str]]) -> list[str]:
    """The packages that import themselves by a detour."""
    reached: dict[str, set[str]] = {}
    for name in {name for edge in edges for name in edge}:
        found: set[str] = set()
        waiting = [name]
        while waiting:
            here = waiting.pop()
            new = {other for own, other in edges if own == here} - found
            found |= new
            waiting += new
        reached[name] = found
    return sorted(name for name, found in reached.items() if name in found)


def attributes_of_a_client(home: Path) -> list[str]:
    """The public attributes that `Client.__init__` sets."""
    path = next(home / name for name in ("contract/client.py", "engine/client.py") if (home / name).exists())
    (client,) = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Client")
    (made,) = (node for node in client.body if getattr(node, "name", "") == "__init__")
    targets = [target for node in ast.walk(made) if isinstance(node, ast.Assign) for target in node.targets]
    each = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return sorted({part.attr for part in each if isinstance(part, ast.Attribute) and not part.attr.startswith("_")})


def at_first_step(source: Path) -> tuple[list[str], list[str]]:
    """The frames from `main` to a site's step, and the public names of `Client`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", AT_FIRST_STEP, str(Path(folder) / "run")]
        done = subprocess.run(command, env=environment(source), capture_output=True, text=True, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    if not told:
        raise RuntimeError(f"no step was reached under {source}:\n{done.stderr[-2000:]}")
    frames, names = json.loads(told[0].removeprefix("told "))
    return frames, names


def measured(source: Path) -> dict[str, Any]:
    """All that the table shows of one state of the package."""
    home = source / "equipoise"
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in home.rglob("*.py")}
    edges = edges_of(home)
    frames, names = at_first_step(source)
    return {
        "lines": sum(lines.values()),
        "modules": len(lines),
        "median_module": int(statistics.median(lines.values())),
        "longest_module": max(lines.values()),
        "edges": len(edges),
        "in_cycles": in_cycles(edges),
        "telling_lines": sum(n for path, n in lines.items() if path.relative_to(home).parts[0] in TELLING),
        "frames": frames,
        "names": names,
        "attributes": attributes_of_a_client(home),
    }


def main() -> None:
    """Measure both, and write `before_and_after.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="66c2f93", help="the commit to compare with")
    parser.add_argument("--quick", action="store_true", help="this tree alone")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    given = parser.parse_args()
    with sources("" if given.quick else given.before) as found:
        content = {name: measured(source) for name, source in found.items()}
    content |= {
        "command": f"python benchmarks/before_and_after.py --before {given.before}",
        "before_commit": given.before,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "before_and_after.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name in found:
        own = content[name]
        print(name, {key: len(value) if isinstance(value, list) else value for key, value in own.items()})


if __name__ == "__main__":
    main()
