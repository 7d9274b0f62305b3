"""`chat`: answers of a sampler that writes fixed texts, commands, and how it is left."""

import asyncio
import io
import itertools
import threading

import pytest

from tests.fixtures.fake_sampler import HOT, LIMITS, TOKENIZER, Writer
from tpu_rl.commands.serve import chat
from tpu_rl.serving.app import Account, App
from tpu_rl.serving.pump import Pump


@pytest.fixture
def speaker():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    account = Account(TOKENIZER, itertools.count(), most_idle=1)
    app = App(Pump(Writer), TOKENIZER, "tiny", LIMITS, HOT, {None: account})
    yield chat.Speaker("tiny", app, account, loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def talk(speakers, text, monkeypatch, **flags):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    chat.converse(speakers, chat.Flags(("tiny",), max_new_tokens=20, **flags))


def test_messages_are_answered_until_the_input_ends(speaker, monkeypatch, capsys):
    asked = []
    encode = speaker._account.history.encode

    def observed(messages, *others):
        asked.append(messages)
        return encode(messages, *others)

    monkeypatch.setattr(speaker._account.history, "encode", observed)
    talk([speaker], "hello\nmore\n/system be brief\nhello\n/reset\nhello\n", monkeypatch)
    assert capsys.readouterr().out.split() == ["yes"] * 4
    said = ["user", "assistant", "user"]
    roles = [[message["role"] for message in messages] for messages in asked]
    assert roles == [["user"], said, ["system", "user"], ["user"]]
    assert asked[2][0]["content"] == "be brief"


def test_two_models_answer_side_by_side(speaker, monkeypatch, capsys):
    talk([speaker, speaker], "hello\n/quit\nhello\n", monkeypatch)
    assert capsys.readouterr().out == "[tiny] yes\n[tiny] yes\n"


def test_an_answer_that_is_ended_leaves_the_conversation_as_it_was(speaker, monkeypatch, capsys):
    step = speaker._app.pump.step

    def interrupted(seconds):
        monkeypatch.setattr(speaker._app.pump, "step", step)
        raise KeyboardInterrupt

    monkeypatch.setattr(speaker._app.pump, "step", interrupted)
    talk([speaker], "hello\nhello\n", monkeypatch)
    assert capsys.readouterr().out.split() == ["[ended]", "yes"]
    assert [message["role"] for message in speaker._messages] == ["user", "assistant"]


def test_mistakes_are_one_line_and_the_chat_goes_on(speaker, monkeypatch, capsys):
    text = f"/nope\n/temperature hot\n{'a' * 200}\nhello\n"
    talk([speaker], text, monkeypatch)
    output = capsys.readouterr()
    assert output.out.split() == ["yes"]
    assert "/nope is none of /reset" in output.err
    assert "'hot' is no temperature" in output.err
    assert "/reset begins a new conversation" in output.err


@pytest.mark.parametrize(
    "argv", [[], ["x", "--temperature", "-1"], ["x", "--max-new-tokens", "0"], ["nowhere/x"]]
)
def test_bad_flags_are_one_message(argv, capsys):
    assert chat.main(argv) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_a_model_without_a_template_continues_lines(capsys, monkeypatch):
    lines = iter(["12+30="])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or end_of_input())
    assert chat.main(["builtin:arithmetic", "--temperature", "0", "--max-new-tokens", "8"]) == 0
    printed = capsys.readouterr()
    assert "#" in printed.out
    assert "continues each line as plain text" in printed.err


def end_of_input() -> str:
    raise EOFError
