"""MCP servers as environments: tools listed and called, errors, and servers that end."""

import sys
import textwrap

import pytest

from tpu_rl.environments import contract, named
from tpu_rl.errors import InputError, MachineError
from tpu_rl.runtime import worker_child

pytestmark = pytest.mark.slow

SERVER = """
import os
import mcp.server
Server = getattr(mcp.server, "MCPServer", None)
if Server is None:
    from mcp.server.fastmcp import FastMCP as Server
server = Server("notes")
notes = []

@server.tool()
def add_note(text: str) -> str:
    '''Write a note.'''
    notes.append(text)
    return f"{len(notes)} notes"

@server.tool(name="read-notes")
def read_notes(first: int = 0) -> str:
    '''Read the notes.'''
    return ", ".join(notes[first:])

@server.tool()
def fail() -> str:
    '''Fail.'''
    raise ValueError("no such note")

@server.tool()
def end() -> str:
    '''End the server.'''
    os._exit(1)

server.run()
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    pytest.importorskip("mcp")
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(textwrap.dedent(SERVER))
    return f"{sys.executable} {file}"


def test_tools_are_listed_called_and_reset(command):
    environment = named.load(f"mcp:{command}")[None]()
    about = contract.describe(environment, "")
    schemas = {tool["function"]["name"]: tool["function"] for tool in about.tools}
    assert set(schemas) == {"add_note", "read-notes", "fail", "end"}
    assert schemas["add_note"]["parameters"]["required"] == ["text"]
    assert not about.is_scored
    assert contract.reset(environment, {"prompt": "x"}, 0) is None
    calls = [("add_note", {"text": "a"}), ("add_note", {"text": "b"}), ("read-notes", {"first": 1})]
    results = contract.call(environment, list(schemas), calls)
    assert results == [
        ("add_note", "1 notes", False),
        ("add_note", "2 notes", False),
        ("read-notes", "b", False),
    ]
    # Errors of tools, and arguments that they do not have, are for the model to read.
    bad = contract.call(environment, list(schemas), [("fail", {}), ("add_note", {"self": 1})])
    assert [is_error for _, _, is_error in bad] == [True, True]
    assert "fail" in bad[0][1]
    contract.reset(environment, {}, 0)
    [(_, text, _)] = contract.call(environment, list(schemas), [("read-notes", {})])
    assert text == ""
    with pytest.raises(contract.Fault, match="has ended"):
        contract.call(environment, list(schemas), [("end", {})])
    contract.reset(environment, {}, 0)
    assert contract.call(environment, list(schemas), [("add_note", {"text": "c"})])[0][2] is False
    worker_child.wait_for(environment._stop())


@pytest.mark.parametrize("bad", ["", "no-such-command-anywhere", f"{sys.executable} -c 1"])
def test_a_server_that_does_not_answer_is_one_message(bad):
    pytest.importorskip("mcp")
    with pytest.raises(InputError, match="server"):
        named.load(f"mcp:{bad}")


def test_without_the_package_its_name_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MachineError, match="mcp"):
        named.load("mcp:python server.py")
