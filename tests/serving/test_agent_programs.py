"""Agent frameworks and coding agents: what they really send, and that their episodes are exact.

`python -m tests.serving.test_agent_programs NAME...` starts programs and stores what they send.
"""

import asyncio
import importlib.metadata
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fixtures import agent_functions, programs
from tpu_rl import user_code
from tpu_rl.serving.record import branches_of
from tpu_rl.serving.replies import BROKEN

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "agent_frameworks.md"
STORED = ROOT / "tests" / "fixtures" / "data" / "agent_requests"
ROW = {"prompt": "Which number is in note.txt?", "answer": "7"}
LAST = "\n\nThe number is 7. \n"


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def thinking(first: str, *others: str) -> list[str]:
    """Return answers of which the first has thoughts and a text before its call."""
    return [f"<think>\nI read it.\n</think>\n\nLooking. \n{first}", *others]


READ = thinking(call("read", name="a"), f"{call('read', name='b')}\n{call('read', name='c')}", LAST)
BASH = {"command": "cat note.txt", "description": "Read"}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Program(NamedTuple):
    """A program, and the answers that lead it through an episode of one branch."""

    source: str
    """FILE of the page, or function of `agent_functions`."""
    package: str
    """Name of the module, or of the command."""
    distribution: str
    """Name of the package whose version is stored; empty for a command."""
    answers: list[str]


PROGRAMS = {
    "openai_agents": Program("openai_agents.py", "agents", "openai-agents", READ),
    "langgraph": Program("langgraph", "langgraph", "langgraph", READ),
    "pydantic_ai": Program("pydantic_ai", "pydantic_ai", "pydantic-ai-slim", READ),
    "smolagents": Program(
        "code_agent.py",
        "smolagents",
        "smolagents",
        ["I add. \n<code>\nprint(3 + 4)\n</code>", "<code>\nfinal_answer(7)\n</code>"],
    ),
    "mini_swe_agent": Program(
        "mini_swe_agent",
        "minisweagent",
        "mini-swe-agent",
        thinking(call("bash", command="cat note.txt"), call("bash", command=SUBMIT)),
    ),
    "claude_code": Program(
        "claude_code.py", "claude", "", thinking(call("Bash", **BASH), call("Nope", x=1), LAST)
    ),
    "codex": Program(
        "codex", "codex", "", thinking(call("exec_command", cmd="cat note.txt"), LAST.rstrip())
    ),
}


def function_of(program: Program, folder: Path) -> Any:
    """Return the agent, from the page where it is printed there."""
    if not program.source.endswith(".py"):
        return getattr(agent_functions, program.source)
    blocks = re.findall(r"```python\n(# (\S+)\n.*?)```", PAGE.read_text(), re.DOTALL)
    file = folder / program.source
    file.write_text({name: block for block, name in blocks}[program.source])
    return user_code.load_function(f"{file}:run", "agent")


def is_installed(program: Program) -> bool:
    if not program.distribution:
        return shutil.which(program.package) is not None
    return importlib.util.find_spec(program.package) is not None


async def played(program: Program, folder: Path) -> tuple[float, programs.Recorded]:
    """Return the reward of an episode, and what was recorded of it."""
    with programs.served(program.answers) as recorded:
        value = function_of(program, folder)(ROW, recorded.url, programs.KEY)
        return await value if inspect.isawaitable(value) else value, recorded


def posted(recorded: programs.Recorded) -> list[dict[str, Any]]:
    return [
        {"path": entry["path"], "body": json.loads(entry["body"])}
        for entry in recorded.requests
        if entry["body"]
    ]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_itself_makes_one_branch(name, tmp_path):
    program = PROGRAMS[name]
    if not is_installed(program):
        pytest.skip(f"{program.package} is not installed")
    reward, recorded = asyncio.run(played(program, tmp_path))
    assert [entry for entry in recorded.requests if entry["body"] and entry["status"] != 200] == []
    assert len(branches_of(recorded.account.turns)) == 1
    assert len(posted(recorded)) == len(program.answers)
    assert reward == 1


def ask(recorded: programs.Recorded, path: str, body: Any) -> bytes:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {programs.KEY}"}
    url = recorded.url.removesuffix("/v1") + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return response.read()


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_sends_makes_one_branch(name):
    stored = json.loads((STORED / f"{name}.json").read_text())
    program = PROGRAMS[name]
    with programs.served(program.answers) as recorded:
        for request in stored["requests"]:
            assert ask(recorded, request["path"], request["body"])
        calls = recorded.account.turns
    assert len(calls) == len(program.answers)
    [branch] = branches_of(calls)
    written = [token for call in calls for token in call.turn.tokens]
    assert branch.actions == written
    assert BROKEN not in programs.TOKENIZER.decode(branch.tokens)


def store(name: str, folder: Path) -> None:
    """Start a program, and store what it sends, without its long texts."""
    program = PROGRAMS[name]
    _, recorded = asyncio.run(played(program, folder))
    if program.distribution:
        version = importlib.metadata.version(program.distribution)
    else:
        command = [program.package, "--version"]
        version = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    requests = [
        request | {"body": programs.without_private(programs.shortened(request["body"]))}
        for request in posted(recorded)
    ]
    value = {"version": version, "requests": requests}
    (STORED / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    for one in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            store(one, Path(folder))
