"""Packs the logs of studies in `results/` for git, and unpacks them.

python benchmarks/archive.py pack results/STUDY ...      # runs/ becomes runs.xz; git ignores runs/
python benchmarks/archive.py unpack [results/STUDY ...]  # runs.xz becomes runs/
"""

import argparse
from pathlib import Path

from equipoise.studies.archive import ARCHIVE, pack, unpack

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "a study's logs"

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> None:
    """Pack or unpack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["pack", "unpack"])
    parser.add_argument("studies", type=Path, nargs="*", help="folders of studies; all by default")
    options = parser.parse_args()
    known = "runs" if options.what == "pack" else ARCHIVE
    for study in options.studies or sorted(path.parent for path in RESULTS.glob(f"*/{known}")):
        (pack if options.what == "pack" else unpack)(study)


if __name__ == "__main__":
    main()
