"""The file of users, their keys and limits."""

import pytest

from tpu_rl.errors import InputError
from tpu_rl.tinker import users

ANN = users.User("ann", "tml-of-ann-0123456789", most_clients=1, most_gigabytes=0.5)
BOB = users.User("bob", "tml-of-bob-0123456789")
FILE = """
[ann]
key = "tml-of-ann-0123456789"
most_clients = 1
most_gigabytes = 0.5

[bob]
key = "tml-of-bob-0123456789"
"""


def test_users_are_read_with_their_limits(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    ann, bob = users.read(path)
    assert ann == ANN
    assert bob == BOB


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("tml-of-bob", "tml-of-ann", "the same key"),
        ("tml-of-bob-0123456789", "tml-", "no tml-..."),
        ("tml-of-bob", "sk-of-bob", "no tml-..."),
        ("most_clients", "clients", "'clients'"),
        ("= 1\n", "= 0\n", "most_clients of ann is no number"),
        ("[bob]", "[../bob]", "Invalid"),
        ("[bob]", '["../bob"]', "no name of a user"),
        (FILE, "", "it has no user"),
    ],
)
def test_files_of_keys_that_are_wrong_are_refused(tmp_path, old, new, why):
    path = tmp_path / "keys.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(InputError) as error:
        users.read(path)
    assert why in error.value.why
