"""Known weaknesses of the locked dependencies, by pip-audit: `python benchmarks/audit.py`, a part of `make check`.

Where the net does not let it ask, or its source does not know the packages, one line says so, and that is no failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "nothing: `make check` runs it"

LOCKED = Path(__file__).resolve().parents[1] / "constraints-hashed.txt"
SECONDS = 300


def audit(locked: Path = LOCKED) -> tuple[int, str]:
    """Ask about every locked dependency; the exit status, and what to print."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(locked), "--require-hashes", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off"]
    try:
        told = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
        return verdict(json.loads(told.stdout))
    except subprocess.TimeoutExpired:
        return 0, f"dependencies were not audited: no answer within {SECONDS} s"
    except ValueError:
        reason = (told.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
        return 0, f"dependencies were not audited: {reason[:200]}"


def verdict(report: Mapping[str, Any]) -> tuple[int, str]:
    """What pip-audit's report comes to; a package that it could not find was not audited."""
    found = report["dependencies"]
    weak = [
        f"{package['name']} {package['version']}: {flaw['id']}, mended in {' or '.join(flaw['fix_versions']) or 'none'}"
        for package in found
        for flaw in package.get("vulns", ())
    ]
    unknown = sum("skip_reason" in package for package in found)
    lines = [*weak, *([f"{unknown} of {len(found)} dependencies were not audited: not found"] if unknown else ())]
    return bool(weak), "\n".join(lines or [f"no known weakness; dependencies audited: {len(found)}"])


if __name__ == "__main__":
    status, text = audit()
    print(text)
    sys.exit(status)
