"""The Python tool: confined programs, in an episode with a scripted policy."""

import json
import string

import pytest

from tests.fixtures import sandboxes
from tpu_rl import sandbox
from tpu_rl.environments import contract
from tpu_rl.environments.pool import EnvironmentPool
from tpu_rl.errors import MachineError
from tpu_rl.rollout.conversations.episodes import Episodes
from tpu_rl.rollout.requests import Environment
from tpu_rl.sandbox import processes
from tpu_rl.tasks import python_tool
from tpu_rl.tasks.python_tool import PythonTool
from tpu_rl.tokenizers import characters

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>\n{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
TURNS = [
    ("print(sum(range(101)))", "5050"),
    ("x = 1", "(nothing printed)"),
    ("print(x)", "NameError: name 'x' is not defined"),
    ("print(open('/etc/passwd').read())", "FileNotFoundError: [Errno 2] No such file or directory"),
    ("import socket\nsocket.socket()", "PermissionError: [Errno 1] Operation not permitted"),
]
"""(program, the beginning of what follows)."""


@sandboxes.confined
def test_a_scripted_policy_runs_programs_that_can_do_no_harm():
    tokenizer = characters(string.printable, TEMPLATE)
    rows = [{"prompt": [{"role": "user", "content": "Calculate."}]}]
    with Episodes(
        rows=rows,
        environment=Environment(EnvironmentPool("python_tool"), len(TURNS) + 1, 200),
        tokenizer=tokenizer,
        max_prompt_tokens=500,
        step=0,
    ) as episodes:
        episodes.begin()
        for code, expected in TURNS:
            call = json.dumps({"name": "python", "arguments": {"code": code}})
            text = f"<tool_call>{call}</tool_call>"
            episodes.on_turn(0, [*tokenizer.encode(text), tokenizer.eos_ids[0]], True)
            answers = {}
            while not answers:
                answers = episodes.poll(wait=True)
            observation = tokenizer.decode(answers[0] or [], skip_special=False)
            assert observation.startswith(f"\n<bos>tool\n{expected}"), observation
        episodes.on_turn(0, [*tokenizer.encode("5050"), tokenizer.eos_ids[0]], True)
        while episodes.poll(wait=True) != {0: None}:
            pass
        (result,) = episodes.by_row.values()
    assert (result.tool_calls, result.errors, result.reward, result.fault) == (5, 0, None, "")


@sandboxes.confined
def test_long_and_endless_outputs_are_cut(monkeypatch):
    limits = sandbox.SandboxLimits(seconds=0.5, output_kb=2)
    monkeypatch.setattr(python_tool, "LIMITS", limits)
    tool = PythonTool()
    assert contract.describe(tool, "").tools[0]["function"]["name"] == "python"
    assert tool.python("print('a' * 700)") == f"{'a' * 300}\n...\n{'a' * 300}"
    assert tool.python("while True: pass") == "(stopped after 0.5 s)"
    assert tool.python("while True: print(1)").endswith("(stopped: it prints too much)")
    assert tool.python("import os; os._exit(3)") == "(exit 3)"


def test_without_a_sandbox_nothing_runs(monkeypatch):
    monkeypatch.setattr(processes, "refusal", lambda: "no namespaces")
    with pytest.raises(MachineError, match="cannot sandbox"):
        PythonTool()
