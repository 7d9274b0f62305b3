"""Runs of a model with a chat template: what they say about prompts, and what they save."""

import json
from dataclasses import replace

import jax
import pytest

from tpu_rl import models, rewards, tokenizers
from tpu_rl.commands import config, roles, run
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.evaluate import evaluate
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import ChatSettings

NOTE = "note: prompts are wrapped by the model's chat template; --data.chat never turns it off"
PLAIN = [{"prompt": f"Repeat {i}", "completion": str(i)} for i in range(8)]
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
CHATS = [{"messages": TURNS[:2]}, *[{"messages": TURNS}] * 7]
MINE = (
    "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}{{ mood }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<bos>{{ m.role }}{% if loop.last %}:{% endif %}{{ m.content }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


def command(checkpoint, folder, rows, *flags):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"--steps": 1, "--batch.prompts": 4, "--batch.row-length": 128}
    sizes |= {"--sampling.max-prompt-tokens": 64, "--sampling.max-new-tokens": 8}
    sizes |= {"--evaluation.rows": 0, "--run-dir": folder / "run"}
    given = ["sft", "--model.path", str(checkpoint), "--data.path", str(file)]
    return [*given, *(str(text) for pair in sizes.items() for text in pair), *flags]


def check(*arguments):
    flags = [*command(*arguments), "--optimizer.warmup-steps", "0"]
    return preflight.check(config.parse(flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "flags", "is_noted", "is_warned"),
    [
        (PLAIN, [], True, False),
        (PLAIN, ["--data.chat", "always"], True, False),
        (PLAIN, ["--data.chat", "never"], False, True),
        (CHATS, [], False, False),
        (CHATS, ["--data.chat", "never"], False, False),
        ([{"text": str(i)} for i in range(8)], [], False, False),
    ],
)
def test_a_run_says_once_how_it_uses_the_template(
    checkpoint, tmp_path, capsys, rows, flags, is_noted, is_warned
):
    warnings = check(checkpoint, tmp_path, rows, *flags)
    assert capsys.readouterr().err.count(NOTE) == is_noted
    assert sum("the model has a chat template" in warning for warning in warnings) == is_warned


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        (PLAIN, ["--data.chat", "never", "--data.system", "be kind"], r"--data\.system"),
        (PLAIN, ["--tokenizer.chat-template", "missing.jinja"], "no such template file"),
        (PLAIN, ["--tokenizer.template-kwargs", "enable_thinking=false"], "does not read"),
        # The first conversation has one turn, and does not show it.
        (CHATS, ["--tokenizer.chat-template", "{forgetful}"], "--data.assistant-turns last"),
        ([CHATS[1] | {"tools": "add"}] * 8, [], "`tools` is a list of objects"),
    ],
)
def test_a_run_refuses_settings_that_do_not_fit(checkpoint, tmp_path, rows, flags, message):
    (tmp_path / "forgetful.jinja").write_text(FORGETFUL)
    flags = [flag.format(forgetful=tmp_path / "forgetful.jinja") for flag in flags]
    with pytest.raises(InputError, match=message):
        check(checkpoint, tmp_path, rows, *flags)


@pytest.mark.parametrize("reward", ["{}", "0.5*{}", "after(of={})"])
def test_the_log_ratio_of_models_is_refused_for_prompts_that_the_template_wraps(
    checkpoint, tmp_path, reward
):
    implicit = f"implicit(model={checkpoint},reference={checkpoint})"
    flags = command(checkpoint, tmp_path, PLAIN, "--reward", reward.format(implicit))
    flags = ["reinforce", *flags[1:], "--optimizer.warmup-steps", "0"]
    with pytest.raises(InputError, match="log-probs of one text after two prompts"):
        preflight.check(config.parse(flags))
    preflight.check(config.parse([*flags, "--data.chat", "never"]))


def test_the_last_turns_alone_can_be_learned(checkpoint, tmp_path):
    (tmp_path / "forgetful.jinja").write_text(FORGETFUL)
    flags = ["--tokenizer.chat-template", str(tmp_path / "forgetful.jinja")]
    check(checkpoint, tmp_path, CHATS, *flags, "--data.assistant-turns", "last")


def test_a_model_without_a_template_reads_plain_prompts(tmp_path, capsys):
    path = roles.model_path("builtin:arithmetic")
    assert not check(path, tmp_path, [{"prompt": f"{i}+1=", "completion": "2"} for i in range(8)])
    assert "wrapped" not in capsys.readouterr().err
    with pytest.raises(InputError, match="no chat template"):
        check(path, tmp_path, PLAIN, "--data.chat", "always")


def test_an_agent_needs_a_chat_template_or_texts():
    preflight.require_texts(config.FileData(chat="never"))
    preflight.require_texts(config.preset("arithmetic_grpo").data)
    with pytest.raises(InputError, match="has no chat template, so that every chat of the agent"):
        preflight.require_texts(config.FileData())


def test_the_problems_of_a_task_stay_plain_text(checkpoint):
    preset = config.preset("arithmetic_grpo")
    preset = replace(preset, model=replace(preset.model, path=str(checkpoint)))
    tokenizer = roles.load_tokenizer(preset, checkpoint)
    assert tokenizer.has_chat_template
    assert tokenizer.encode_prompt("1+1=") == tokenizer.encode("1+1=")


@pytest.mark.slow
def test_a_trained_model_is_saved_with_its_template(checkpoint, tmp_path, capsys):
    file = tmp_path / "mine.jinja"
    file.write_text(MINE)
    flags = ["--tokenizer.chat-template", str(file), "--tokenizer.template-kwargs", "mood=!"]
    assert run.main(command(checkpoint, tmp_path, PLAIN, *flags)) == 0
    assert capsys.readouterr().err.count(NOTE) == 1
    saved = tokenizers.load(tmp_path / "run" / "model")
    assert saved.chat_template == MINE
    # The run continues, and its settings are read from its folder.
    loaded = config.load(tmp_path / "run" / "config.yaml")
    tokenizer = roles.load_tokenizer(loaded, checkpoint)
    ids = tokenizer.encode_prompt("a")
    assert tokenizer.decode(ids, skip_special=False) == "<bos>user:a!<eos><bos>assistant:"
    arguments = [str(tmp_path / "run"), "--rows", "2", "--greedy", "--reward", "gsm8k"]
    problems = tmp_path / "problems.jsonl"
    problem = {"messages": TURNS[:1], "prompt": "a", "answer": "1"}
    problems.write_text(json.dumps(problem) + "\n")
    assert evaluate.main([*arguments, "--data.path", str(problems)]) == 0
    assert NOTE in capsys.readouterr().err


def test_evaluation_takes_the_settings_of_flags_before_those_of_the_preset(tmp_path):
    flags = evaluate.Flags(
        model="model",
        preset="grpo",
        data=evaluate.DataFlags(chat="never", system="be kind"),
        tokenizer=tokenizers.TokenizerConfig(template_kwargs=("deep=1",)),
    )
    settings = evaluate.load_settings(flags)
    assert (settings.data.chat, settings.data.system) == ("never", "be kind")
    assert settings.tokenizer.template_kwargs == ("deep=1",)
    unchanged = evaluate.load_settings(evaluate.Flags(model="model", preset="grpo"))
    assert unchanged == config.preset("grpo")
    with pytest.raises(InputError, match="made by a task"):
        evaluate.load_settings(replace(flags, preset="arithmetic_grpo"))


@pytest.mark.slow
def test_a_reward_model_reads_prompts_as_in_its_training(checkpoint, tmp_path):
    tokenizer = tokenizers.load(checkpoint)
    model = models.variant(models.from_config(checkpoint), num_outputs=1)
    models.save(tmp_path, model, model.init(jax.random.key(0)), tokenizer)
    settings = ChatSettings(True, "be kind", template_kwargs={"deep": 1})
    # A model of another library reads conversations.
    assert rewards.reward_model.read_chat(tmp_path, True) == ChatSettings(wraps_prompts=True)
    assert rewards.reward_model.open_model(tmp_path).tokenizer.wraps("a")
    reading = rewards.reward_model.ScoreReadout()
    for chat, expected in [(None, ChatSettings()), (settings, settings)]:
        rewards.reward_model.write_reading(tmp_path, reading, chat)
        assert rewards.reward_model.read_reading(tmp_path) == reading
        assert rewards.reward_model.open_model(tmp_path).tokenizer.chat == expected
    score = rewards.reward_model.load(tmp_path)
    conversation = [{"role": "user", "content": "a"}]
    answer = [{"role": "assistant", "content": "b"}]
    assert score(["a"], ["b"]) == score([conversation], [answer])
    (tmp_path / "reward.json").write_text('{"chat": {"wrap": true}}')
    with pytest.raises(InputError, match="does not say how scores are read"):
        rewards.reward_model.open_model(tmp_path)
