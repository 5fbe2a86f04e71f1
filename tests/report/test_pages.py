"""Pages of reports as readers use them: tables that sort and filter, figures that answer, any screen, paper."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_report import HOSTILE, TRAIN, write_run

from browsing import drawn_figures, opened
from equipoise.report import write_report

#: where `npm install axe-core` has put the checker of accessibility
AXE = [
    Path(os.environ.get("EQUIPOISE_AXE", "node_modules/axe-core/axe.min.js")),
    Path("/usr/local/lib/node_modules/axe-core/axe.min.js"),
    Path("/usr/lib/node_modules/axe-core/axe.min.js"),
]
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a site of a hostile name."""
    train = {**TRAIN, HOSTILE: [30, 20, 10, 5]}
    return write_report([write_run(tmp_path_factory.mktemp("pages") / "run", "fedbn", "personal", train)])


def first_column(page: Any, table: str) -> list[str]:
    return page.eval_on_selector_all(
        f"{table} tbody tr:not(.group):not([hidden])", "rows => rows.map(row => row.cells[0].textContent.trim())"
    )


def test_tables_sort_by_any_column_and_tell_screen_readers(report: Path, browser: Any):
    with opened(browser, report) as page:
        table = page.locator("table.data", has_text="Work and traffic by site").first
        page.evaluate("element => { element.id = 'work'; }", table.element_handle())
        images = page.locator("#work th", has_text="Images per round")
        for order, expected in (("descending", ["Vienna", "Barcelona"]), ("ascending", [HOSTILE, "Ljubljana"])):
            images.locator("button").click()
            assert images.get_attribute("aria-sort") == order
            assert first_column(page, "#work")[:2] == expected


def test_words_are_explained_on_hover_and_to_the_keyboard(report: Path, browser: Any):
    with opened(browser, report) as page:
        word = page.locator("th:has(button)", has_text="Balanced accuracy").first
        word.locator("[data-means]").hover()
        assert page.locator("#tip").inner_text().startswith("Recall of each class, averaged")
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()
        word.locator("button").focus()
        assert page.locator("#tip").is_visible()
        assert "averaged" in str(word.locator("button").get_attribute("aria-description"))


def test_long_tables_filter_and_turn_pages(tmp_path: Path, browser: Any):
    train = {f"site {number:02d}": [number + 5, 4, 3, 2] for number in range(60)}
    with opened(browser, write_report([write_run(tmp_path / "run", train=train, rounds=2)])) as page:
        tools = page.locator(".tools:has(+ .wide[aria-label^='Work and traffic'])")
        shown = page.locator(".wide[aria-label^='Work and traffic'] tbody tr:not([hidden])")
        assert shown.count() == 25 and "1 to 25 of 60 rows" in tools.inner_text()
        tools.get_by_text("Next").click()
        assert "26 to 50 of 60" in tools.inner_text() and shown.first.locator("th").inner_text() == "site 25"
        tools.locator("input").fill("site 4")
        assert shown.count() == 10 and tools.get_by_text("Next").is_hidden()
        tools.locator("input").fill("nothing")
        assert "no row has this text" in tools.inner_text()


def test_figures_are_drawn_when_near_and_keys_hide_what_they_name(tmp_path: Path, browser: Any):
    runs = [write_run(tmp_path / "fedavg", rounds=2), write_run(tmp_path / "fedbn", "fedbn", "personal", rounds=2)]
    with opened(browser, write_report(runs)) as page:
        page.wait_for_selector("#lead-lead .main-svg")
        assert page.locator("#run2-traffic .main-svg").count() == 0, "far below: drawn when it comes near"
        marks = page.locator("#lead-lead .scatterlayer .point")
        before = marks.count()
        key = page.locator("#lead-lead .key", has_text="fedbn")
        key.click()
        assert key.get_attribute("aria-pressed") == "false" and 0 < marks.count() < before
        assert drawn_figures(page) == page.eval_on_selector_all("figure", "all => all.map(each => each.id)")


def test_the_reader_chooses_the_page_of_a_figure_and_the_mouse_tells_counts(report: Path, browser: Any):
    with opened(browser, report) as page:
        figure = page.locator("#run1-confusion")
        figure.scroll_into_view_if_needed()
        page.wait_for_selector("#run1-confusion .main-svg")
        figure.locator("select").select_option(label="Sydney")
        page.wait_for_selector("#run1-confusion .plots[data-drawn='2'], #run1-confusion .plots[data-drawn='3']")
        cell = figure.locator(".heatmaplayer image").first.bounding_box()
        page.mouse.move(cell["x"] + cell["width"] / 8, cell["y"] + cell["height"] / 8)
        page.wait_for_selector("#run1-confusion .hoverlayer text")
        assert "nevus taken for nevus" in str(figure.locator(".hoverlayer").text_content())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_needs_no_sideways_scrolling_and_colours_follow_the_reader(
    report: Path, browser: Any, scheme: str
):
    with opened(browser, report, 400, scheme) as page:
        drawn_figures(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        inks = page.eval_on_selector_all(".xtick text", "all => all.map(each => getComputedStyle(each).fill)")
        light = [np.mean(json.loads(ink.replace("rgb(", "[").replace(")", "]"))) > 128 for ink in inks]
        assert inks and all(light) == any(light) == (scheme == "dark")


def test_paper_has_all_rows_and_dark_ink(report: Path, browser: Any):
    with opened(browser, report, scheme="dark") as page:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        page.wait_for_timeout(300)
        ink = page.eval_on_selector("#lead-lead .xtick text", "each => getComputedStyle(each).fill")
        assert ink == "rgb(29, 36, 48)"
        assert page.locator(".tools").first.is_hidden() and page.locator("pre.config").first.is_visible()


def test_axe_finds_nothing_serious(report: Path, browser: Any):
    script = next((path for path in AXE if path.is_file()), None)
    if script is None:
        pytest.skip("needs axe-core: npm install axe-core")
    for scheme in ("light", "dark"):
        with opened(browser, report, scheme=scheme) as page:
            page.wait_for_selector("#lead-lead .main-svg")
            page.add_script_tag(path=str(script))
            found = page.evaluate("axe.run().then(result => result.violations)")
            told = [(each["id"], each["nodes"][0]["html"][:200]) for each in found if each["impact"] in SERIOUS]
            assert told == []
