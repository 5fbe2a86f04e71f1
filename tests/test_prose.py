"""The checker of sentence length counts what people read, and refuses pages above its limits."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

LONG = "This sentence goes on " + "and on " * 15 + "until it has far more words than any reader wants."
PAGE = f"""# A heading of many words that is not a sentence at all and so must not count here

A short sentence with some words. Another short one follows it. {LONG}

| a table | whose cells hold {LONG} |
|---|---|

```
{LONG}
```

- A first item of the list
- A second item, with `code of many words that count as one word only`
"""


@pytest.fixture(scope="module")
def prose() -> dict:
    return runpy.run_path(str(Path(__file__).resolve().parents[1] / "benchmarks" / "prose.py"))


def test_a_page_is_counted_without_headings_tables_and_code(prose, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = prose["measure"]([page])
    assert found.sentences == 5 and [sentence for _, _, sentence in found.long] == [LONG]


def test_docstrings_comments_and_messages_are_counted_and_names_of_arguments_divide(prose, tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        '"""A module that does one thing.\n\nArgs:\n    first: words that fill most of a sentence '
        'which is long but not too long\n    second: words that fill most of another sentence, which is long too\n"""\n'
        "raise ValueError(f'{1} is told to the reader of this')  # a comment with some words\nshort = 'no'\n"
    )
    found = prose["measure"]([source])
    assert not found.long and [turn for turn, _, _ in found.turns] == ["is told"]
    assert found.sentences == 5


def test_the_checker_fails_above_its_limits_and_shows_the_place(prose, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("A short sentence with some words. " * 2 + LONG)
    assert prose["main"]([str(page)]) == 1
    assert "50.0 % above 25 words" in (out := capsys.readouterr().out) and LONG[:60] in out
    page.write_text("One sentence has quite few words. Another sentence has few words too.")
    assert prose["main"]([str(page)]) == 0
