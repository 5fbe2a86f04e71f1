"""Keys and certificates are renewed without shutting anybody out, and what is over is told in words."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from equipoise.cli.app import app
from equipoise.core.errors import UserError
from equipoise.hospitals.authority import Authority, check_authority, check_server_certificate, names_of
from equipoise.hospitals.coordinator import check_server, running_superlink
from equipoise.hospitals.deployment_files import ServerFile
from equipoise.hospitals.door import NAME
from equipoise.hospitals.links import Link
from equipoise.hospitals.parcels import UnreadableParcel, prepare, seal
from equipoise.hospitals.pilot import make_certificates
from equipoise.hospitals.processes import free_port
from equipoise.hospitals.renewal import renew
from equipoise.hospitals.security import node_keys, private_key, signer, verifier
from knocking import Caller


@pytest.fixture
def folder(tmp_path) -> Path:
    """The files of a consortium with one site."""
    _, files = make_certificates(tmp_path / "c", f"127.0.0.1:{free_port()}", ["server.example.org"], ["a"])
    files["a"].write_text(files["a"].read_text() + '[policy]\ntrain = ["model"]\n[data]\nname = "phantom"\n')
    return tmp_path / "c"


def test_a_sites_old_and_new_key_are_both_let_in_until_the_old_one_is_taken_out(folder):
    site, known = folder / "sites" / "a", folder / "server" / "nodes" / "a.pub"
    lines = renew(site / "site.toml", "key", None, 1)
    assert any("send node.pub to the coordinator" in line for line in lines)
    assert all(stat.S_IMODE((site / name).stat().st_mode) == 0o600 for name in ("node.key", "node.key.old"))

    def told() -> list[int | None]:
        with running_superlink(ServerFile.read(folder / "server" / "server.toml"), False) as superlink:
            keys = (private_key(site / name) for name in ("node.key", "node.key.old"))
            return [Caller(superlink.public, key).ask("GET", NAME).status for key in keys]

    shutil.copy(site / "node.pub", known)
    assert told() == [200, 200]
    known.write_bytes(known.read_bytes().splitlines()[0])
    assert told() == [200, 401]


def test_new_certificates_of_ca_and_server_go_with_those_that_sites_have(folder):
    server, handed_out = folder / "server", folder / "sites" / "a" / "ca.crt"
    before = {path: path.read_bytes() for path in (server / "ca.crt", server / "server.crt", server / "server.key")}
    names = names_of(server / "server.crt")
    for what in ("ca", "certificate"):
        command = ["renew", str(server / "server.toml"), what, "--authority", str(folder / "ca.key"), "--days", "9"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0 and "valid for 9 days" in result.output, result.output
    assert all(path.read_bytes() != content for path, content in before.items())
    assert names_of(server / "server.crt") == names and "server.example.org" in names
    with running_superlink(ServerFile.read(server / "server.toml"), False) as superlink:
        assert superlink.public.healthy() is None
        assert Link(superlink.public.address, handed_out).healthy() is None


def test_a_site_with_both_public_keys_obeys_the_coordinators_old_and_new_one(folder):
    server, handed_out = folder / "server", folder / "sites" / "a" / "coordinator.pub"
    renew(server / "server.toml", "coordinator", None, 1)
    check_server(ServerFile.read(server / "server.toml"), insecure=False)
    new, old = (
        signer(server / name)(seal(prepare({}), action="train")) for name in ("coordinator.key", "coordinator.key.old")
    )
    for parcel in (new, old):
        verifier(server / "coordinator.pub")(parcel)
    verifier(handed_out)(old)
    with pytest.raises(UnreadableParcel, match="did not sign"):
        verifier(handed_out)(new)


def test_what_is_over_is_told_with_the_command_that_renews_it(folder):
    server = folder / "server"
    past = Authority.read(server / "ca.crt", folder / "ca.key", days=0)
    past.issue(["localhost"], server / "server.crt", server / "server.key")
    with pytest.raises(UserError, match=r"was valid until .*equipoise renew SERVER.toml certificate"):
        check_server_certificate(server / "server.crt", server / "server.key")
    past.write_certificate(server / "ca.crt")
    with pytest.raises(UserError, match=r"was valid until .*equipoise renew SERVER.toml ca"):
        check_authority(server / "ca.crt")


@pytest.mark.parametrize(
    ("file", "what", "authority", "told"),
    [
        ("server/server.toml", "key", None, "'key' cannot be renewed here; choose ca or certificate or coordinator"),
        ("sites/a/site.toml", "ca", None, "'ca' cannot be renewed here; choose key"),
        ("server/server.toml", "ca", None, "--authority ca.key"),
        ("server/server.toml", "ca", "server/server.key", "is not the key of the certificate"),
        ("server/server.toml", "certificate", "server/ca.crt", "are not the CA's certificate and key"),
        ("server/lost.toml", "ca", None, "cannot read .*lost.toml: No such file"),
    ],
)
def test_what_cannot_be_renewed_is_refused_in_words(folder, file, what, authority, told):
    (folder / "server" / "ca.crt").chmod(0o600)
    with pytest.raises(UserError, match=told):
        renew(folder / file, what, folder / authority if authority else None, 1)


def test_a_private_key_that_others_can_read_is_refused_with_the_remedy(folder):
    for name in ("coordinator.key", "server.key"):
        (folder / "server" / name).chmod(0o640)
        with pytest.raises(UserError, match=rf"{name} can be read by other accounts.*chmod 600"):
            check_server(ServerFile.read(folder / "server" / "server.toml"), insecure=False)
        (folder / "server" / name).chmod(0o600)


def test_a_file_of_public_keys_may_hold_remarks_but_nothing_else(tmp_path, folder):
    known = (folder / "server" / "nodes" / "a.pub").read_bytes()
    (tmp_path / "two.pub").write_bytes(b"# of spring\n\n" + known)
    assert len(node_keys(tmp_path / "two.pub")) == 1
    for content in (b"", b"# nothing\n", known + b"garbage\n"):
        (tmp_path / "bad.pub").write_bytes(content)
        with pytest.raises(UserError, match=r"bad.pub"):
            node_keys(tmp_path / "bad.pub")
