"""Options of commands: what was not given sets nothing, and is not blamed for what is wrong elsewhere."""

from __future__ import annotations

import re

import pytest

from equipoise.cli import hospitals as deploy_cli
from equipoise.cli.options import given
from equipoise.core.errors import UserError


def test_only_what_was_given_is_set():
    assert given(rounds=3, seed=0, device=None, flag=False) == {"rounds": 3, "seed": 0, "flag": False}
    assert given(rounds=None, device=None) is None


@pytest.mark.parametrize(("rounds", "blamed"), [(None, "bad.toml"), (3, "bad.toml with what the command line sets")])
def test_a_bad_file_is_not_blamed_on_options_that_nobody_gave(tmp_path, monkeypatch, rounds, blamed):
    pytest.importorskip("flwr")
    monkeypatch.setattr(deploy_cli, "_prepare", lambda: None)  # this process goes on listening to signals
    (tmp_path / "bad.toml").write_text("[train]\nepochs = 0\n")
    with pytest.raises(UserError, match=f"{re.escape(blamed)} is not valid"):
        deploy_cli.pilot(str(tmp_path / "bad.toml"), rounds=rounds, out=tmp_path / "pilot")
