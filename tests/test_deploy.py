"""The files and keys of a deployment: what is refused in words, and certificates that really vouch."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from PIL import Image
from typer.testing import CliRunner

from equipoise.cli import app
from equipoise.deploy.flower_api import Link, public_key_bytes
from equipoise.deploy.pilot import lay_out, make_certificates
from equipoise.deploy.policy import policy_for
from equipoise.deploy.server import conduct, running_superlink
from equipoise.deploy.settings import ServerFile, SiteFile, check_security, on_loopback
from equipoise.deploy.site import check_connection, check_site
from equipoise.errors import UserError
from equipoise.methods import get_method, method_names
from harness import tiny_config


def test_certificates_vouch_for_the_server_and_private_files_are_private(tmp_path):
    server, files = make_certificates(tmp_path, "0.0.0.0:8443", ["server.example.org"], ["a", "b/c"])
    authority = x509.load_pem_x509_certificate((server.parent / "ca.crt").read_bytes())
    certificate = x509.load_pem_x509_certificate((server.parent / "server.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "server.example.org" in names.get_values_for_type(x509.DNSName)
    ssl.create_default_context(cafile=server.parent / "ca.crt")
    private = [tmp_path / "ca.key", server.parent / "server.key", *(f.parent / "node.key" for f in files.values())]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private)
    known = ServerFile.read(server)
    assert {site: public_key_bytes(path) for site, path in known.sites.items()} == {
        site: public_key_bytes(path.parent / "node.pub") for site, path in files.items()
    }
    assert len({public_key_bytes(path) for path in known.sites.values()}) == 2


def test_a_second_consortium_does_not_overwrite_the_first(tmp_path):
    make_certificates(tmp_path, "0.0.0.0:8443", ["localhost"], ["a"])
    with pytest.raises(UserError, match="already"):
        make_certificates(tmp_path, "0.0.0.0:8443", ["localhost"], ["a"])


@pytest.fixture
def site_file(tmp_path) -> Path:
    """The file of site 1 of a tiny pilot."""
    return lay_out(tmp_path / "pilot", tiny_config("fedavg"))[1]["site 1"]


def test_a_pilots_files_are_sound(site_file):
    federation = check_site(SiteFile.read(site_file), insecure=False)
    assert "site 1" in {site.name for site in federation.sites}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "site 1"', 'name = "site 9"', "no site 'site 9'; its sites: site 1, site 2, site 3"),
        ('key = "node.key"', 'key = "lost.key"', "lost.key: no such file"),
        ('key = "node.key"', "", "no key"),
        ('key = "node.key"', 'kee = "node.key"', "kee: unknown key"),
        ("[policy]", "[policy]\n[unused]", "unused: unknown key"),
        ('device = "auto"', 'device = "tpu"', "no device"),
    ],
)
def test_a_mistake_in_a_sites_file_is_told_in_words(site_file, old, new, told):
    text = site_file.read_text()
    assert old in text
    site_file.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=told):
        check_site(SiteFile.read(site_file), insecure=False)


def test_a_server_that_is_not_there_is_told_in_words(site_file):
    with pytest.raises(UserError, match=r"cannot reach the SuperLink at https://127.0.0.1:.*firewall"):
        check_connection(SiteFile.read(site_file), insecure=False)


@pytest.mark.parametrize("address", ["10.0.0.1:8443", "hospital.example.org:8443", "0.0.0.0:8443"])
def test_insecure_is_for_loopback_only(site_file, address):
    settings = SiteFile.read(site_file)
    check_security(settings, "127.0.0.1:8443", insecure=True)
    with pytest.raises(UserError, match="only for this machine"):
        check_security(settings, address, insecure=True)
    assert not on_loopback(address)


def test_a_hospital_may_lack_a_class_and_its_folder_may_have_any_name(tmp_path, site_file):
    for name in ("nevus", "melanoma"):
        for number in range(20):
            path = tmp_path / "images" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (number, 10 * number, 0)).save(path)
    before = site_file.read_text().partition("[data]")[0]
    classes = 'classes = ["nevus", "melanoma", "keratosis"]'
    store = f'store = "{tmp_path / "store"}"'
    site_file.write_text(f'{before}[data]\nname = "folder:{tmp_path / "images"}"\nsize = 16\n{classes}\n{store}\n')
    federation = check_site(SiteFile.read(site_file), insecure=False)
    assert [site.name for site in federation.sites] == ["site 1"]
    assert federation.sites[0].class_counts(3).tolist()[2] == 0


@pytest.mark.parametrize("method", method_names())
def test_a_methods_own_policy_names_everything_on_its_disclosure_sheet(method):
    client = get_method(method).client
    policy = policy_for(client)
    assert {"describe", "evaluate"} <= policy.keys()
    for action, entries in client.discloses.items():
        assert sorted(entries) == policy.get(action, [])


def test_central_learning_is_refused_between_hospitals(tmp_path):
    server, _ = make_certificates(tmp_path, "127.0.0.1:8443", ["localhost"], ["a"])
    with pytest.raises(UserError, match="needs all images in one place"):
        conduct(tiny_config("central"), ServerFile.read(server), tmp_path / "run", Link("127.0.0.1:1"))


def test_a_server_does_not_start_without_the_keys_of_its_sites(tmp_path):
    server, _ = make_certificates(tmp_path, "127.0.0.1:8443", ["localhost"], ["a"])
    (server.parent / "nodes" / "a.pub").unlink()
    with pytest.raises(UserError, match="public key of 'a'"):
        running_superlink(ServerFile.read(server), insecure=False).__enter__()


def test_the_command_line_says_which_file_is_missing(tmp_path):
    result = CliRunner().invoke(app, ["server", str(tmp_path / "none.toml")])
    assert isinstance(result.exception, UserError) and "none.toml: no such file" in str(result.exception)
