"""Tasks in Harbor's layout: what is read, confined machines, and containers of a fake engine."""

import json
import os
import re
import stat
import sys
import textwrap
from pathlib import Path

import pytest

from recipes import harbor_rows
from tests.fixtures import sandboxes
from tpu_rl import sandbox
from tpu_rl.commands import config
from tpu_rl.commands.checks import preflight
from tpu_rl.environments import contract, named
from tpu_rl.environments.contract import Fault
from tpu_rl.environments.pool import EnvironmentPool
from tpu_rl.errors import InputError, MachineError
from tpu_rl.tasks.adapters import computers, harbor

DOCKERFILE = """
FROM ubuntu:24.04
# What the model finds.
ENV GREETING="hello there" \\
    KIND=plain
WORKDIR /app
COPY --chown=root data/ data/
COPY note.txt copied.txt
RUN mkdir made && \\
    echo $KIND > made/kind
CMD ["bash"]
"""
TEST = """#!/bin/bash
echo judged
if [ "$(cat /app/answer.txt)" = "$WANTED" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
SETTINGS = """
version = "1.0"
[verifier]
timeout_sec = 20.0
[verifier.env]
WANTED = "hello there"
[environment]
memory = "512M"
storage_mb = 32
"""


def write_task(folder, settings=SETTINGS, dockerfile=DOCKERFILE, test=TEST, solution=True):
    files = {
        "task.toml": settings,
        "instruction.md": "<!-- a canary GUID -->\n\nWrite the greeting to answer.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/data/inner/words": "words\n",
        "environment/note.txt": "a note\n",
        "tests/test.sh": test,
    }
    if solution:
        files["solution/solve.sh"] = "#!/bin/bash\nprintenv GREETING > /app/answer.txt\n"
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def played(name, task, commands, seconds=10.0):
    """Return what the commands of an episode print, and the environment."""
    environment = named.load(f"harbor:{name}")[None]()
    contract.reset(environment, {"harbor_task": task}, 0, call_seconds=seconds)
    calls = [("bash", {"command": command}) for command in commands]
    return [text for _, text, _ in contract.call(environment, ["bash"], calls)], environment


# --- confined machines ---


@sandboxes.confined
def test_a_confined_machine_does_a_dockerfile_and_the_tests_judge(tmp_path):
    write_task(tmp_path / "greeting")
    commands = [
        "pwd; find . -type f | sort; cat made/kind",
        "x=1; cd data; printenv GREETING > ../answer.txt",
        "echo $x; pwd; false",
        "ls /tests",
    ]
    printed, environment = played(f"local:{tmp_path}", "greeting", commands)
    assert printed[0] == "/app\n./copied.txt\n./data/inner/words\n./made/kind\nplain"
    assert printed[1] == "(nothing printed)"
    # Files are kept; variables and the directory are those of one command.
    assert printed[2] == "\n/app\n(exit 1)".lstrip("\n")
    assert "No such file" in printed[3]
    assert contract.reward(environment) == 1.0
    contract.reset(environment, {"harbor_task": "greeting"}, 0, call_seconds=10.0)
    assert contract.reward(environment) == 0.0


@pytest.mark.slow
@sandboxes.confined
def test_through_workers_the_model_has_one_tool_and_rows_name_the_task(tmp_path):
    write_task(tmp_path / "greeting")
    pool = EnvironmentPool(f"harbor:local:{tmp_path}")
    (about,) = pool.descriptions.values()
    assert [tool["function"]["name"] for tool in about.tools] == ["bash"]
    assert (about.name, about.is_scored, about.columns) == ("Harbor", True, ["harbor_task"])
    with pytest.raises(InputError, match="harbor_task"):
        pool.require_columns(["prompt"])
    assert not pool.reset(0, {"harbor_task": "greeting"}).result().fault
    reply = pool.call(0, [("bash", {"command": "echo $GREETING"})]).result()
    assert reply.results[0].content == "hello there"
    assert "no such task" in pool.reset(1, {"harbor_task": "other"}).result().fault
    pool.close()


@sandboxes.confined
@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("#!/bin/bash\necho broken; exit 3\n", r"no reward \(exit 3\): broken"),
        ("#!/bin/bash\necho good > /logs/verifier/reward.txt\n", "no number"),
        ("#!/bin/bash\necho nan > /logs/verifier/reward.txt\n", "no number"),
        ('#!/bin/bash\necho \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n', "no number"),
        pytest.param(
            "#!/bin/bash\nsleep 9\n", "do not end within 1 s", marks=pytest.mark.slow, id="late"
        ),
    ],
)
def test_tests_without_a_verdict_are_a_fault_and_no_zero(tmp_path, test, reason):
    write_task(tmp_path / "t", test=test)
    _, environment = played(f"local:{tmp_path}", "t", [], seconds=2.0)
    with pytest.raises(Fault, match=reason):
        contract.reward(environment)


@pytest.mark.slow
@sandboxes.confined
def test_what_a_model_leaves_is_no_verdict(tmp_path):
    write_task(tmp_path / "t", test="#!/bin/bash\n. /tests/helper.sh\n")
    planted = "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/helper.sh"
    commands = [planted, "echo 1 > /logs/verifier/reward.txt", "sleep 9"]
    printed, environment = played(f"local:{tmp_path / 't'}", "t", commands, seconds=2.0)
    assert printed[2] == "(stopped after 1 s)"
    with pytest.raises(Fault, match="no reward"):
        contract.reward(environment)


@pytest.mark.slow
@sandboxes.confined
def test_a_reward_may_be_json_and_the_time_of_a_task_ends(tmp_path):
    test = '#!/bin/bash\necho \'{"reward": 0.25, "style": 1}\' > /logs/verifier/reward.json\n'
    write_task(tmp_path / "t", SETTINGS + "[agent]\ntimeout_sec = 0.5\n", test=test)
    printed, environment = played(f"local:{tmp_path}", "t", ["sleep 9", "echo late"])
    assert printed == ["(stopped after 0.5 s)", "(the time for this task is over)"]
    assert contract.reward(environment) == 0.25


@sandboxes.confined
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("RUN apt-get install -y jq", "line 3, RUN: exit"),
        ("COPY nothing.txt /app/", "line 3, COPY: exit 1.*nothing.txt"),
        ("COPY ../tests /app/", "line 3, COPY: exit 1"),
    ],
)
def test_what_a_confined_machine_cannot_do_is_a_fault(tmp_path, line, reason):
    write_task(tmp_path / "t", dockerfile=f"FROM a\nWORKDIR /app\n{line}\n")
    with pytest.raises(Fault, match=reason):
        played(f"local:{tmp_path}", "t", [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("COPY --from=builder /a /b", "line 3, COPY: a confined machine cannot"),
        ("RUN <<EOF", "line 3, RUN: a confined machine cannot"),
        ("USER app", "line 3, USER: a confined machine cannot"),
        ("FROM scratch", "several stages"),
    ],
)
def test_what_no_confined_machine_can_do_is_named_before_an_episode(tmp_path, line, reason):
    write_task(tmp_path / "t", dockerfile=f"FROM a\nWORKDIR /app\n{line}\n")
    with pytest.raises(InputError, match="no task of the folder") as raised:
        write_and_load(tmp_path)
    assert re.search(reason, raised.value.why)


def test_rows_of_tasks_that_cannot_be_done_are_refused_before_the_run(docker, tmp_path):
    tasks = tmp_path / "tasks"
    write_task(tasks / "good")
    write_task(tasks / "windows", SETTINGS + 'os = "windows"\n')
    rows = [{"prompt": "a", "harbor_task": name} for name in ("good", "windows", "other")]
    file = tmp_path / "rows.jsonl"
    flags = ["arithmetic_grpo", "--environment", f"harbor:{tasks}", "--batch.prompts=1"]
    flags += ["--environment-limits.no-isolate", "--data.path", str(file)]
    for left_out, message, why in (
        (0, "2 rows, the first being row 1, whose `harbor_task` is 'windows'", "os = windows"),
        (1, "1 rows, the first being row 1, whose `harbor_task` is 'other'", "no such value"),
    ):
        shown = [row for number, row in enumerate(rows) if number != left_out or not left_out]
        file.write_text("".join(json.dumps(row) + "\n" for row in shown))
        settings = config.parse(["grpo", *flags[1:]])
        with pytest.raises(InputError, match=message) as raised:
            preflight.check_rows(settings)
        assert why in raised.value.why


@pytest.mark.slow
@sandboxes.confined
def test_rows_are_those_of_tasks_whose_solution_earns_more(tmp_path, capsys):
    write_task(tmp_path / "good")
    write_task(tmp_path / "unsolved", solution=False)
    write_task(tmp_path / "always", test="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    write_task(tmp_path / "windows", SETTINGS + 'os = "windows"\n')
    file = tmp_path / "rows.jsonl"
    assert harbor_rows.main([f"local:{tmp_path}", "--to", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "always: left out: its solution earns 1, an untouched computer 1",
        "good: taken: its solution earns 1, an untouched computer 0",
        "unsolved: left out: it has no solution, an untouched computer 0",
        "windows: left out: [environment] os = windows is not supported",
        f"1 of 4 tasks: {file}",
    ]
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["harbor_task"] == "good"
    assert row["prompt"][0]["content"].startswith("Write the greeting")


@pytest.mark.slow
@sandboxes.confined
def test_a_machine_confines_what_runs_in_it():
    machine = sandbox.Machine(disk_mb=16)
    run = machine.run
    assert run("echo a > f; cat f; cat", stdin=b"b").printed == "a\nb"
    assert (
        "unreachable"
        in run(
            "python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80), 2)' 2>&1"
        ).printed
    )
    for forbidden in ("touch /usr/x", "touch /etc/x", "unshare -r true", "mount -t tmpfs a /tmp"):
        assert run(forbidden).code, forbidden
    assert not run(f"test ! -e {Path(__file__).resolve()} && test ! -e {Path.home()}/.cache").code
    assert run("head -c 99999999 /dev/zero > big").code
    # Process 1 is not theirs to end, and what a command leaves behind goes on.
    assert run("kill -9 1; rm big; (sleep 0.2; echo left > late) & true").code == 0
    assert run("sleep 1; cat late").printed == "left\n"
    assert run("sleep 9", seconds=0.2).is_late
    assert len(run("yes | head -c 200000").printed) == 1 << 16
    assert run("cd nowhere", cwd="/no/such").code == 126
    machine.close()
    with pytest.raises(sandbox.MachineLost):
        run("true")


# --- containers ---

FAKE_DOCKER = """#!{python} -IS
import json, os, shutil, subprocess, sys
root = {root!r}
folders = ("/tests", "/logs", "/app", "/solution")

def moved(text, home):
    for folder in folders:
        text = text.replace(folder, home + folder)
    return text

word, *rest = sys.argv[1:]
with open(root + "/calls", "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
if word == "info":
    sys.exit(0)
if word == "build":
    os.makedirs(f"{{root}}/images/{{rest[2]}}")
elif word == "image":
    sys.exit(not os.path.isdir(f"{{root}}/images/{{rest[1]}}"))
elif word == "run":
    home = f"{{root}}/{{rest[rest.index('--name') + 1]}}"
    os.makedirs(home + "/app")
    print("the entry point\\nready", flush=True)
    sys.stdin.read()
elif word == "cp":
    home, target = f"{{root}}/{{rest[1].split(':')[0]}}", rest[1].split(":")[1]
    shutil.copytree(rest[0], home + target, dirs_exist_ok=True)
    for path, _, names in os.walk(home + target):
        for name in names:
            text = open(f"{{path}}/{{name}}").read()
            open(f"{{path}}/{{name}}", "w").write(moved(text, home))
elif word == "exec":
    env = dict(os.environ)
    name = next(value for value in rest if value.startswith("tpu-rl-"))
    home = f"{{root}}/{{name}}"
    words = rest[rest.index(name) + 1:]
    env |= dict(value.split("=", 1) for value in rest[:rest.index(name)] if "=" in value)
    words[-1] = moved(words[-1], home)
    sys.exit(subprocess.run(words, cwd=home + "/app", env=env).returncode)
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Put an engine on PATH that runs commands in folders. Return the folder of its calls."""
    root = tmp_path / "engine"
    root.mkdir()
    program = root / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(FAKE_DOCKER.format(python=sys.executable, root=str(root)))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return root


def calls_of(docker):
    return [json.loads(line) for line in (docker / "calls").read_text().splitlines()]


@pytest.mark.slow
def test_a_container_builds_runs_and_judges(docker, tmp_path, capsys):
    tasks = tmp_path / "tasks"
    write_task(tasks / "t", SETTINGS + '[environment.env]\nGREETING = "hello there"\n')
    with pytest.raises(Fault, match="its image is not built"):
        played(tasks, "t", [])
    assert harbor_rows.main([str(tasks)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "t: taken: its solution earns 1, an untouched computer 0",
        "1 of 1 tasks",
    ]
    printed, environment = played(tasks, "t", ["printenv GREETING > answer.txt", "sleep 9"], 2.0)
    assert printed == ["(nothing printed)", "(stopped after 1 s)"]
    assert contract.reward(environment) == 1.0
    run = next(call for call in calls_of(docker) if call[0] == "run")
    assert run[run.index("--network") + 1] == "none"
    assert run[run.index("--memory") + 1] == "512m"
    # Another Dockerfile is another image.
    (tasks / "t" / "environment" / "Dockerfile").write_text("FROM other\n")
    with pytest.raises(Fault, match="its image is not built"):
        played(tasks, "t", [])


def test_a_task_that_allows_a_network_has_it_and_an_image_needs_no_build(docker, tmp_path):
    settings = 'docker_image = "them/image"\nnetwork_mode = "public"\nworkdir = "/app"\n'
    write_task(tmp_path / "tasks" / "t", SETTINGS + settings + '[agent]\nuser = "me"\n')
    printed, _ = played(tmp_path / "tasks", "t", ["echo $((1 + 1))"])
    assert printed == ["2"]
    run, *_, command = calls_of(docker)[1:]
    assert "--network" not in run
    assert "them/image" in run
    assert command[2:6] == ["-w", "/app", "-u", "me"]


def test_a_container_that_does_not_start_says_why(docker, tmp_path):
    write_task(tmp_path / "tasks" / "t", SETTINGS + 'docker_image = "them/image"\n')
    program = docker / "bin" / "docker"
    said = 'if word == "run":\n    sys.exit("pull: no such image\\nSee the manual.")\n'
    program.write_text(program.read_text().replace('if word == "info"', f'{said}if word == "info"'))
    with pytest.raises(
        Fault, match=r"the container does not start: pull: no such image; See the manual\."
    ):
        played(tmp_path / "tasks", "t", [])


def test_without_a_container_runtime_one_line_says_so(tmp_path, monkeypatch):
    write_task(tmp_path / "t")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no container runtime") as raised:
        named.load(f"harbor:{tmp_path}")
    assert raised.value.why == "docker is not on PATH; podman is not on PATH"
    assert "harbor:local:DIR" in raised.value.fix


# --- reading ---


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("[[steps]]\nname = 'a'\n", "steps"),
        ("[environment]\ngpus = 1\n", "gpus"),
        ("[environment]\nnetwork_mode = 'allowlist'\n", "allowlist"),
        ("[verifier]\nenvironment_mode = 'separate'\n", "environment of its own"),
        ("[verifier.env]\nKEY = '${KEY}'\n", "from this machine"),
        ("[environment]\nmemory = 'much'\n", "is no size"),
        ("[environment\n", "Expected"),
        ("verifier = 1\n", "has no attribute"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, settings, reason):
    write_task(tmp_path / "t", settings)
    (found,) = harbor.read_tasks(tmp_path).values()
    assert isinstance(found, str)
    assert reason in found
    with pytest.raises(InputError, match="no task of the folder"):
        write_and_load(tmp_path)


def write_and_load(folder):
    if sandbox.refusal():
        pytest.skip("no confined machines")
    named.load(f"harbor:local:{folder}")


def test_a_folder_without_tasks_is_named(tmp_path):
    with pytest.raises(InputError, match="has no task"):
        harbor.read_tasks(tmp_path)
    with pytest.raises(InputError, match="has no task"):
        harbor.read_tasks(tmp_path / "nowhere")


def test_fields_of_older_and_newer_files(tmp_path):
    old = textwrap.dedent(
        """
        version = "1.0"
        [environment]
        memory = "2G"
        storage = "10G"
        allow_internet = true
        """
    )
    task = harbor.read_task(write_task(tmp_path / "old", old))
    assert (task.megabytes("memory"), task.megabytes("storage")) == (2048, 10240)
    assert task.has_network
    new = old + 'network_mode = "no-network"\nmemory_mb = 64\n'
    task = harbor.read_task(write_task(tmp_path / "new", new))
    assert (task.megabytes("memory"), task.has_network) == (64, False)
    assert task.instruction == "Write the greeting to answer.txt.\n"


def test_instructions_of_a_dockerfile():
    found = list(computers.instructions("from a\n\nRUN b \\\n  # why\n  c\nENV D e f\n"))
    assert found == [(1, "FROM", "a"), (3, "RUN", "b c"), (6, "ENV", "D e f")]
