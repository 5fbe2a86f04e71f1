"""How much of the contract a method's author sees."""

from equipoise.contract.method import Client

#: about fifteen names; each more is one that every author reads
MOST_NAMES = 20


def test_a_client_shows_its_author_few_names_and_explains_each():
    names = [name for name in dir(Client) if not name.startswith("_")]
    assert len(names) <= MOST_NAMES
    assert all(getattr(Client, name).__doc__ for name in names)
