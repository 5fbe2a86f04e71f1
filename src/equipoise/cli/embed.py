"""The command `equipoise embed`: features of a run's images, as files and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.screen import say


def embed(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of finished runs")],
    out: Annotated[Path | None, typer.Option(help="a folder; default embedding/ in the first run's")] = None,
    maps: Annotated[list[str] | None, typer.Option("--map", help="pca or t-sne; repeatable; default pca")] = None,
    most: Annotated[int | None, typer.Option(min=10, help="so many images at most, evenly spaced")] = None,
) -> None:
    """Example: equipoise embed runs/fedavg runs/prr --map pca --map t-sne

    Write the features that models give all images of a run, and draw them by class and site.
    """
    from equipoise.core.errors import UserError
    from equipoise.evidence.embedding import MAPS, embedding_of, mapped
    from equipoise.report.embedding_page import write_embedding_page

    kinds = list(dict.fromkeys(maps or ["pca"]))
    unknown = [kind for kind in kinds if kind not in MAPS]
    if unknown:
        raise UserError(f"--map {unknown[0]}: there is no such map; choose {' or '.join(MAPS)}")
    found = [embedding_of(run, most) for run in runs]
    planes = {kind: [mapped(one.features, kind) for one in found] for kind in kinds}
    folder = out or runs[0] / "embedding"
    folder.mkdir(parents=True, exist_ok=True)
    for place, one in enumerate(found):
        name = one.run if len({other.run for other in found}) == len(found) else f"{one.run}-{place + 1}"
        one.save(folder / f"{name.replace('/', '-')}.npz")
    write_embedding_page(found, planes, folder / "features.html")
    say(f"features: {folder}, drawn in {folder / 'features.html'}")
