"""The parts of the package's description that depend on where the repository lives: pyproject.toml holds the rest."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)]+)\)")


def described(readme: str, repository: str) -> str:
    """The README for a package index, where links into the repository lead nowhere by themselves.

    With an address of the repository, links get it. Without one, the texts of links stay and pictures go.
    """

    def mended(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if repository:
            return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/main/{target})"
        return "" if picture else text

    return LINK.sub(mended, readme)


if __name__ == "__main__":
    address = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["equipoise"]["repository"]
    setup(
        long_description=described((HERE / "README.md").read_text(encoding="utf-8"), address),
        long_description_content_type="text/markdown",
        project_urls={"Repository": address, "Changelog": f"{address}/blob/main/CHANGELOG.md"} if address else {},
    )
