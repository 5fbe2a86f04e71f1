"""The locked dependencies are those that are tested together, with hashes, and the audit says what it could ask."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AUDIT = ROOT / "benchmarks" / "audit.py"


def plain(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, tuple[set[str], int]]:
    """{package: its versions, and how many hashes they have}."""
    found: dict[str, tuple[set[str], int]] = {}
    name = ""
    for line in (ROOT / "constraints-hashed.txt").read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9_.-]+)==([^ ;]+)", line):
            name = plain(match[1])
            found[name] = (found.get(name, (set(), 0))[0] | {match[2]}, 0)
        if "--hash=sha256:" in line:
            found[name] = (found[name][0], found[name][1] + 1)
    return found


def test_every_constraint_is_locked_at_its_version_and_every_package_has_hashes():
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    known = locked()
    for name, version in (line.split("==") for line in lines):
        assert known.get(plain(name), [set()])[0] == {version}, f"{name}: `make lock` locks it"
    assert all(hashes for _, hashes in known.values())


def test_everything_that_make_installs_is_locked_and_no_host_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"--editable '\.\[([a-z,]+)\]'", (ROOT / "Makefile").read_text())[1].split(",")
    wanted = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    assert {plain(re.match(r"[A-Za-z0-9_.-]+", text)[0]) for text in wanted} <= locked().keys()
    assert "://" not in (ROOT / "constraints-hashed.txt").read_text()


def test_a_known_weakness_is_named_and_an_unknown_package_is_not_called_sound():
    verdict = runpy.run_path(str(AUDIT))["verdict"]
    weak = {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
    sound, unknown = {"name": "b", "version": "1", "vulns": []}, {"name": "c", "skip_reason": "not found"}
    assert verdict({"dependencies": [sound]}) == (False, "no known weakness; dependencies audited: 1")
    assert verdict({"dependencies": [sound, unknown]}) == (False, "1 of 2 dependencies were not audited: not found")
    status, text = verdict({"dependencies": [weak, unknown]})
    assert status and text.splitlines()[0] == "a 1: CVE-1, mended in 2"


def test_without_the_net_the_audit_is_one_line_and_no_failure():
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    command, environment = [sys.executable, str(AUDIT)], {**os.environ, **nowhere}
    told = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert told.returncode == 0 and told.stdout.startswith("dependencies were not audited: ")
    assert len(told.stdout.splitlines()) == 1 and not told.stderr


def test_links_into_the_repository_lead_somewhere_on_a_package_index():
    described = runpy.run_path(str(ROOT / "setup.py"), run_name="described")["described"]
    readme = "See [data](docs/data.md), [Flower](https://flower.ai) and ![a report](docs/report.png)."
    assert described(readme, "") == "See data, [Flower](https://flower.ai) and ."
    place = "https://example.org/equipoise"
    found = described(readme, place)
    assert (
        f"[data]({place}/blob/main/docs/data.md)" in found and f"![a report]({place}/raw/main/docs/report.png)" in found
    )


def test_a_missing_extra_is_named_by_what_it_needs():
    from equipoise.core.errors import install

    told = install("flower")
    assert told.startswith("install the extra flower: pip install 'flwr") and "/" not in told
