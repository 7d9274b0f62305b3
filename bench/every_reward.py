"""Rewards that are built in, on generated rows: does a policy gain by each, and not by a coin?

    python bench/every_reward.py --to runs/every_reward [--only NAME ...] [--minutes 20]
    python bench/every_reward.py --page

A task is a prompt of a few words, one right completion, and completions with a fault. A small model
with random weights imitates demonstrations, of which a share has a fault (SFT). Then it learns by
GRPO from the reward, and, beside it, from a coin, with the same budget. Each seed has weights, an
order of demonstrations and draws of its own. All models of a task answer the same held-out prompts
with the same random keys, and the reward judges them. A line of RESULTS is added when a run ends,
and what stands there is not run again. --page writes the page from RESULTS.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import arms
import numpy as np

from tpu_rl.evaluation import intervals
from tpu_rl.report import markdown

RESULTS = arms.ROOT / "docs/benchmarks/every_reward.jsonl"
PAGE = arms.ROOT / "docs/benchmarks/every_reward.md"
SEEDS = (0, 1, 2)
PROMPTS = 1200
HELD_OUT = 100
SAMPLES = 8
DEMONSTRATIONS = 6400
FAULTY = 0.5
"""Share of the demonstrations with a fault."""
LENGTHS = (
    "--sampling.max-prompt-tokens 24 --sampling.max-new-tokens 40 --sampling.max-num-seqs 128 "
    "--batch.row-length 64 --batch.micro-batch-rows 16 --model.remat none --evaluation.rows 0 "
    "--checkpoint.interval 1000"
)
SFT = (
    "sft --model.path {to}/base --model.random-init --data.path {to}/{task}_demonstrations.jsonl "
    "--batch.prompts 32 --optimizer.learning-rate 3e-3 --optimizer.warmup-steps 20 --steps 300 "
    + LENGTHS
)
GRPO = (
    "grpo --model.path {to}/{task}_start_{seed}/model --data.path {to}/{task}_rows.jsonl "
    "--batch.prompts 16 --batch.group-size 8 --optimizer.learning-rate 2e-4 "
    "--optimizer.warmup-steps 2 --steps 24 " + LENGTHS
)
DPO = (
    "dpo --model.path {to}/{task}_start_{seed}/model --data.path {to}/{task}_pairs.jsonl "
    "--batch.prompts 32 --optimizer.learning-rate 1e-4 --optimizer.warmup-steps 2 --steps 24 "
    + LENGTHS
)
BRANCH = (
    "sft --model.path {to}/{task}_stable_{seed}/model --optimizer.continued "
    "--data.path {to}/{task}_demonstrations.jsonl --batch.prompts 32 "
    "--optimizer.learning-rate 3e-3 --steps 50 " + LENGTHS
)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


class Example(NamedTuple):
    """A row: what the model reads, and what it may write."""

    prompt: str
    right: str
    faults: list[str]
    columns: dict[str, Any]


class Task(NamedTuple):
    """A reward with its rows."""

    name: str
    make: Callable[[random.Random], Example]
    reward: str
    """Values of --reward; {to} is the folder of the runs."""
    ids: str
    """Rows of docs/coverage.tsv that the run shows."""
    best: float
    """The reward of a right completion."""
    counted: str = ""
    """A term that is measured too, and not rewarded."""
    further: dict[str, str] = {}
    """Further arms: name -> flags, or a command of combine."""


# --- rows ---

WORDS = [
    "tea",
    "cup",
    "pot",
    "milk",
    "salt",
    "rice",
    "bean",
    "corn",
    "fish",
    "lamb",
    "plum",
    "pear",
]
CITIES = "rome oslo cairo lima paris delhi tokyo quito accra lyon bonn kyoto"
ROOMS = "kitchen hall bath attic cellar garage office yard studio lobby shop lab"
WEEK = "monday tuesday wednesday thursday friday saturday sunday"
TOOLS = {
    "weather": {"city": CITIES, "day": WEEK},
    "train": {"goal": CITIES, "day": WEEK},
    "alarm": {"room": ROOMS, "day": WEEK},
    "light": {"room": ROOMS, "level": "off dim low half high full"},
}
PEOPLE = [
    ("anna", "rome", 12, 150),
    ("ben", "oslo", 25, 182),
    ("carl", "lima", 31, 175),
    ("dora", "rome", 44, 160),
    ("emil", "cairo", 58, 171),
    ("fay", "lima", 63, 155),
    ("gus", "oslo", 37, 190),
    ("hana", "delhi", 19, 166),
]
DATABASE = (
    "CREATE TABLE people (name TEXT, city TEXT, age INTEGER, height INTEGER);"
    f"INSERT INTO people VALUES {', '.join(map(repr, PEOPLE))};"
)
TOPICS = dict(ship="vessel", car="motor", cow="cattle", rain="storm", war="battle", gold="metal")
PLACES = dict(sea="ocean", hill="mountain", town="city", farm="field", wood="forest", ice="glacier")
FILLERS = ("report", "letter", "map")
DOCUMENTS = [
    {"id": f"{topic}_{place}_{filler}", "text": f"{TOPICS[topic]} {PLACES[place]} {filler}"}
    for topic in TOPICS
    for place in PLACES
    for filler in FILLERS
]


def other(rng: random.Random, choices: Any, value: Any) -> Any:
    """Return another of the choices."""
    return rng.choice([choice for choice in choices if choice != value])


def tool_call(rng: random.Random) -> Example:
    tool = rng.choice(list(TOOLS))
    values = {key: rng.choice(words.split()) for key, words in TOOLS[tool].items()}
    key = rng.choice(list(values))
    wrong = values | {key: other(rng, TOOLS[tool][key].split(), values[key])}

    def call(name: str, arguments: dict[str, str]) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    right = call(tool, values)
    faults = [
        call(other(rng, TOOLS, tool), values),
        call(tool, wrong),
        call(tool, {key: values[key]}),
        right.replace("}}", "}"),
    ]
    answer = [{"name": tool, "arguments": values}]
    return Example(f"{tool} {' '.join(values.values())}:", right, faults, {"answer": answer})


def query(rng: random.Random) -> Example:
    wanted, key, sign = (
        rng.choice(("name", "city")),
        rng.choice(("age", "height")),
        rng.choice("<>"),
    )
    low, high = (15, 60) if key == "age" else (152, 188)
    number = rng.randrange(low, high)
    word = {"<": "under", ">": "over"}[sign]

    def select(columns: str, sign: str, number: int) -> str:
        return f"SELECT {columns} FROM people WHERE {key} {sign} {number}"

    right = select(wanted, sign, number)
    faults = [
        select("*", sign, number),
        select(wanted, {"<": ">", ">": "<"}[sign], number),
        select({"name": "city", "city": "name"}[wanted], sign, number),
        right.replace(" FROM", ""),
        right.partition(" WHERE")[0],
    ]
    columns = {"answer": right, "database": DATABASE}
    return Example(f"{wanted} of {key} {word} {number}:", right, faults, columns)


def search(rng: random.Random) -> Example:
    topic, place, filler = rng.choice(list(TOPICS)), rng.choice(list(PLACES)), rng.choice(FILLERS)
    words = [TOPICS[topic], PLACES[place], filler]
    asks = rng.choice(("find", "get", "show", "seek", "bring", "search", "want", "need"))
    faults = [
        f"<answer>{other(rng, TOPICS.values(), words[0])} {words[1]} {filler}</answer>",
        f"<answer>{words[0]}</answer>",
        f"<answer>{words[1]} {filler}</answer>",
        " ".join(words),
    ]
    return Example(
        f"{asks} {filler} {topic} {place}:",
        f"<answer>{' '.join(words)}</answer>",
        faults,
        {"answer": [f"{topic}_{place}_{filler}"]},
    )


def patch(rng: random.Random) -> Example:
    name, file = rng.choice(WORDS), rng.choice(("main", "tools", "data"))
    old, new = rng.sample(range(30), 2)

    def diff(file: str, name: str, old: int, new: int) -> str:
        head = f"--- a/{file}.py\n+++ b/{file}.py\n@@ -1 +1 @@\n"
        return f"{head}-{name} = {old}\n+{name} = {new}"

    right = diff(file, name, old, new)
    faults = [
        diff(file, name, old, other(rng, range(30), new)),
        diff(file, other(rng, WORDS, name), old, new),
        diff(other(rng, ("main", "tools", "data"), file), name, old, new),
        f"+{name} = {new}",
    ]
    return Example(f"{file} {name} {old} to {new}:", right, faults, {"patch": right})


def order(rng: random.Random) -> Example:
    words = rng.sample(WORDS, 4)
    keys = words[::-1]
    faults = [
        ", ".join(words),
        ", ".join(keys[:2]),
        ", ".join(keys + keys),
        ", ".join(sorted(keys)),
    ]
    columns = {"keys": keys, "checks": ["def check(text):\n    return text.count(',') == 3"]}
    return Example(f"reverse {' '.join(words)}:", ", ".join(keys), faults, columns)


def unit_test(rng: random.Random) -> Example:
    name = rng.choice(["add", "sub", "mul", "div", "mod", "pow", "max", "min"])
    a, b, c = (rng.randrange(10) for _ in range(3))
    check = f"    assert {name}({a}, {b}) == {c}"
    head, note = f"def test_{name}_works():\n", "    # known\n"
    faults = [
        f"{head}    print({a})\n{check}",
        f"def test_{name}():\n{check}\n{check}",
        f"{head}{note}    assert {a} == {a}",
        f"{head}{note}{check},",
    ]
    prompt = f"test {name} {a} {b} is {c}:"
    return Example(prompt, head + note + check, faults, {"entry_point": name})


def choose(rng: random.Random) -> Example:
    numbers = rng.sample(range(30), 4)
    best = "ABCD"[int(np.argmax(numbers))]
    wrong = other(rng, "ABCD", best)
    shown = " ".join(f"{letter} {n}" for letter, n in zip("ABCD", numbers, strict=True))
    faults = [f"Answer: {wrong}", f"Answer: {best} or {wrong}", f"{max(numbers)}"]
    return Example(f"largest? {shown}:", f"Answer: {best}", faults, {"answer": best})


def think(rng: random.Random) -> Example:
    numbers = rng.sample(range(40), 3)
    best = max(numbers)
    text = f"{best} over {other(rng, numbers, best)}"
    wrong = other(rng, numbers, best)
    faults = [
        f"{best}",
        f"<think>{text} {best}",
        f"<think>{text}</think>{wrong}",
        f"<think>{text}<think>{best}",
    ]
    right = f"<think>{text}</think>{best}"
    return Example(f"largest of {' '.join(map(str, numbers))}:", right, faults, {"answer": best})


def box_of(rng: random.Random) -> Example:
    x, y, wide, high = (rng.randrange(low, 13) for low in (0, 0, 3, 3))
    box = [x, y, x + wide, y + high]
    faults = [
        str([x, y, wide, high]),
        str([x + rng.choice((-2, 2)), y, x + wide, y + high]),
        str([x, y, x + wide + rng.choice((-2, 2)), y + high]),
        " ".join(map(str, box)),
    ]
    return Example(f"at {x} {y} wide {wide} high {high}:", str(box), faults, {"answer": box})


def press(rng: random.Random) -> Example:
    kind, word = rng.choice(("click", "type", "hold")), rng.choice(WORDS)
    x, y, wide, high = (rng.randrange(low, 13) for low in (0, 0, 2, 2))

    def act(kind: str, x: int, y: int, word: str) -> str:
        return json.dumps([{"action": kind, "point": [x, y], "input_text": word}])

    middle = (x + wide // 2, y + high // 2)
    right = act(kind, *middle, word)
    faults = [
        act(other(rng, ("click", "type", "hold"), kind), *middle, word),
        act(kind, x + wide + 2, middle[1], word),
        act(kind, *middle, other(rng, WORDS, word)),
        right[:-1],
    ]
    answer = {"action": kind, "box": [x, y, x + wide, y + high], "text": word}
    return Example(
        f"{kind} {word} at {x} {y} wide {wide} high {high}:", right, faults, {"answer": answer}
    )


def point(rng: random.Random) -> Example:
    x, y, wide, high = (rng.randrange(low, 13) for low in (0, 0, 2, 2))
    middle = (x + wide // 2, y + high // 2)
    faults = [
        str((x + wide + 2, middle[1])),
        str((middle[0], y + high + 2)),
        f"{middle[0]} {middle[1]}",
    ]
    columns = {"answer": [x, y, x + wide, y + high]}
    return Example(f"point at {x} {y} wide {wide} high {high}:", str(middle), faults, columns)


TASKS = (
    Task(
        "tool_calls",
        tool_call,
        "tool_calls",
        "F88",
        3,
        further={"dpo": DPO, "flipped": f"{DPO} --data.flip.share 0.5 --data.flip.where weather"},
    ),
    Task("choice", choose, "choice", "E51", 1),
    Task(
        "box_iou",
        box_of,
        "box_iou",
        "F68",
        1,
        further={
            "stable": SFT.replace("--steps 300", "--steps 250 --optimizer.schedule constant"),
            "decayed": f"{BRANCH} --optimizer.schedule cosine",
            "constant": f"{BRANCH} --optimizer.schedule constant",
        },
    ),
    Task(
        "action",
        press,
        "action",
        "F52 F79",
        1,
        further={
            "transfer": "combine {to}/action_start_{seed}=1 {to}/box_iou_grpo_{seed}=1 "
            "{to}/box_iou_start_{seed}=-1"
        },
    ),
    Task("recall", search, "'recall(documents={to}/documents.jsonl,k=1)'", "D25", 6),
    Task("unit_test_quality", unit_test, "unit_test_quality", "F94", 1),
    Task(
        "think_format", think, "math 0.2*think_format", "F97", 1.2, counted="'phrases(any_of=over)'"
    ),
    Task("sql", query, "sql", "E36", 10),
    Task("patch_ratio", patch, "patch_ratio", "F17", 1),
    Task("ordered_keys", order, "ordered_keys 0.3*python_checks", "E67", 1.3),
    Task("point_in_box", point, "point_in_box", "F80", 1),
)

# --- runs ---


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def examples_of(task: Task) -> list[Example]:
    """Return a task's examples, each with another prompt. The first HELD_OUT are held out."""
    rng = random.Random(task.name)
    examples: dict[str, Example] = {}
    # Some tasks have fewer prompts.
    for _ in range(10 * PROMPTS):
        example = task.make(rng)
        examples.setdefault(example.prompt, example)
    return list(examples.values())[: PROMPTS + HELD_OUT]


def write_rows(task: Task, folder: Path) -> None:
    """Write a task's problems, held-out problems, demonstrations and pairs."""
    rng = random.Random(task.name)
    chosen = examples_of(task)
    rows = [{"prompt": example.prompt} | example.columns for example in chosen]
    write(folder / f"{task.name}_held_out.jsonl", rows[:HELD_OUT])
    write(folder / f"{task.name}_rows.jsonl", rows[HELD_OUT:])
    demonstrations = []
    for _ in range(DEMONSTRATIONS):
        example = rng.choice(chosen[HELD_OUT:])
        is_faulty = rng.random() < FAULTY
        completion = rng.choice(example.faults) if is_faulty else example.right
        demonstrations.append({"prompt": example.prompt, "completion": completion})
    write(folder / f"{task.name}_demonstrations.jsonl", demonstrations)
    pairs = [
        {"prompt": each.prompt, "chosen": each.right, "rejected": rng.choice(each.faults)}
        for each in chosen[HELD_OUT:]
    ]
    write(folder / f"{task.name}_pairs.jsonl", pairs)


def save_base(folder: Path) -> None:
    """Save a model with random weights, whose tokens are words, numbers and runs of other signs."""
    import jax
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    from tpu_rl import models, tokenizers

    parts = r"[A-Za-z]+|[0-9]+|[^A-Za-z0-9]+"
    texts = [
        row.get(column, "")
        for task in TASKS
        for row in map(json.loads, (folder / f"{task.name}_demonstrations.jsonl").open())
        for column in ("prompt", "completion")
    ]
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    words = {word for text in texts for word in re.findall(parts, text)} | set(string.printable)
    vocabulary = {token: i for i, token in enumerate([*special.values(), *sorted(words)])}
    model = fast.Tokenizer(fast.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = fast.pre_tokenizers.Split(fast.Regex(parts), "isolated")
    model.decoder = fast.decoders.Fuse()
    (folder / "words").mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(folder / "words")
    policy = models.from_config(MODEL | {"vocab_size": len(vocabulary)})
    tokenizer = tokenizers.load(folder / "words")
    models.save(str(folder / "base"), policy, policy.init(jax.random.key(0)), tokenizer)


def flags_of(task: Task, arm: str, seed: int, folder: Path | str) -> str:
    """Return the preset and flags of a run."""
    places = {"to": folder, "task": task.name, "seed": seed}
    if arm == "start" or arm in task.further:
        return task.further.get(arm, SFT).format(**places)
    reward = task.reward.format(to=folder)
    if arm == "coin":
        # Of weight 0, the reward is in the metrics.
        reward = " ".join(["coin", *(f"0*{term.rpartition('*')[2]}" for term in reward.split(" "))])
    return f"{GRPO.format(**places)} --reward {reward}"


def train(flags: str, run_dir: Path, seed: int, small: bool) -> None:
    """Run launch/run.py in this process; programs that runs share are compiled once."""
    from tpu_rl.commands import config, run
    from tpu_rl.commands.tools import combine

    argv = shlex.split(flags)
    if argv[0] == "combine":
        combine.main([*argv[1:], "--to", str(run_dir / "model")])
        return
    argv += ["--seed", str(seed), "--run-dir", str(run_dir)]
    run.start(config.parse(argv + (["--steps", "1"] if small else [])), "the same command")


def judged(task: Task, terms: str, folder: Path, model: Path) -> list[float]:
    """Return the mean of terms over a model's sampled answers to each held-out prompt."""
    from tpu_rl.commands import config
    from tpu_rl.commands.recipe import answers

    held_out = folder / f"{task.name}_held_out.jsonl"
    argv = shlex.split(f"grpo --data.path {held_out} {LENGTHS} --evaluation.rows {HELD_OUT}")
    total = np.zeros(())
    # An evaluation judges by one reward. The keys are the same, and so are the answers.
    for term in shlex.split(terms.format(to=folder)):
        weight, _, reward = term.rpartition("*")
        settings = config.parse([*argv, "--reward", reward])
        loaded = answers.load_model(str(model), settings)
        problems = answers.problems_of(settings, is_whole=True)
        rewards = answers.evaluate(settings, *loaded, problems, SAMPLES).rewards
        total = total + float(weight or 1) * rewards.mean(1)
    return [round(float(value), 4) for value in total]


def run_all(folder: Path, results: Path, names: list[str], minutes: float, small: bool) -> None:
    """Run what has no line in `results`, until the time is over."""
    deadline = time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "documents.jsonl", DOCUMENTS)
    for task in TASKS:
        write_rows(task, folder)
    save_base(folder)
    done = {(line["name"], line["arm"], line["seed"]) for line in arms.read_lines(results)}
    chosen = [task for task in TASKS if task.name in names or not names]
    seeds = SEEDS[: 1 if small else None]
    runs = [
        (task, arm, seed) for task in chosen for seed in seeds for arm in ("start", "grpo", "coin")
    ]
    runs += [(task, arm, seed) for task in chosen for seed in seeds for arm in task.further]
    for task, arm, seed in runs:
        if (task.name, arm, seed) in done:
            continue
        if time.monotonic() > deadline:
            return
        run_dir = folder / f"{task.name}_{arm}_{seed}"
        # A run that broke off may have had other settings.
        shutil.rmtree(run_dir, ignore_errors=True)
        start = time.monotonic()
        train(flags_of(task, arm, seed, folder), run_dir, seed, small)
        seconds = round(time.monotonic() - start, 1)
        rewards = judged(task, task.reward, folder, run_dir / "model")
        line = {"name": task.name, "arm": arm, "seed": seed, "seconds": seconds}
        line["rewards"] = rewards
        if task.counted:
            line["counts"] = judged(task, task.counted, folder, run_dir / "model")
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print("DONE", task.name, arm, seed, np.mean(rewards), seconds, flush=True)


# --- the page ---

HEAD = """# Rewards that are built in

This page is generated: `python bench/every_reward.py --page` writes it from `every_reward.jsonl`
beside it, to which `python bench/every_reward.py --to runs/every_reward` adds. Measured on 29
November 2026 on 2 CPU cores that did other work too, so that seconds are upper bounds.

Does a policy learn from each reward? The tasks are small ones that the script makes: a prompt of a
few words, one right completion, and completions with a fault, such as another value or a broken
form. A Llama of two layers of 64 with random weights, whose tokens are words, takes {sft} steps of
SFT on demonstrations, of which half have a fault. From this start come {grpo} steps of GRPO with 16
prompts and 8 completions, once with the reward and once with `coin`, which knows nothing. The
learning rate is 2e-4. On seed 0 of `tool_calls` two others were tried, after 200 steps of SFT: from
-0.41, 1e-4 gave 0.19 (coin -0.37) and 4e-4 gave 0.57 (coin -1.38). Nothing was tuned for the other
tasks.

Each seed has weights, an order of the demonstrations and draws of its own. The numbers are mean
rewards of {samples} answers at temperature 1 to each of {held_out} held-out prompts, the same keys
for all models of a seed. Intervals are 95 % and over the three seeds (Student's t with 2 degrees of
freedom), of differences that are paired on the seed. Such an interval is wide; one that contains 0
shows no gain. A table of prompts like these says that a reward and its run work, not what it gives
on the data of its paper.
"""


def summarize(lines: list[dict[str, Any]]) -> str:
    """Return the page."""
    results = {
        (line["name"], line["arm"], line["seed"]): float(np.mean(line["rewards"])) for line in lines
    }
    seconds = {arm: [x["seconds"] for x in lines if x["arm"] == arm] for arm in ("start", "grpo")}
    rows = []
    for task in TASKS:
        seeds = [seed for seed in SEEDS if (task.name, "coin", seed) in results]
        if not seeds:
            continue
        start, grpo, coin = (
            np.array([results[task.name, arm, seed] for seed in seeds])
            for arm in ("start", "grpo", "coin")
        )
        means = [f"{values.mean():.2f}" for values in (start, grpo, coin)]
        gains = [interval(difference) for difference in (grpo - start, coin - start, grpo - coin)]
        by_seed = ", ".join(f"{a:.2f} to {b:.2f}" for a, b in zip(start, grpo, strict=True))
        rows.append([f"`{task.name}`", task.ids, f"{task.best:g}", *means, *gains, by_seed])
    columns = [
        *("reward", "shows", "of a right answer", "start", "GRPO", "coin", "GRPO - start"),
        *("coin - start", "GRPO - coin", "each seed with GRPO"),
    ]
    head = HEAD.format(
        sft=SFT.partition("--steps ")[2].split()[0],
        grpo=GRPO.partition("--steps ")[2].split()[0],
        samples=SAMPLES,
        held_out=HELD_OUT,
    )
    costs = (
        f"SFT took {np.mean(seconds['start']):.0f} s and GRPO {np.mean(seconds['grpo']):.0f} s in "
        "the mean, in one process that compiles once."
    )
    measured = [task for task in TASKS if (task.name, "coin", SEEDS[0]) in results]
    examples = []
    for task in measured:
        example = task.make(random.Random(task.name))
        examples.append([f"`{task.name}`", code(example.prompt), code(example.right)])
        examples[-1].append(", ".join(map(code, example.faults)))
    places = {"to": "runs/every_reward", "task": "TASK", "seed": "SEED"}
    shown = [
        f"python launch/run.py {flags.format(**places)} --seed SEED"
        for flags in (SFT, f"{GRPO} --reward REWARD")
    ]
    terms = ", ".join(f"`{task.reward}`" for task in measured)
    return "\n".join(
        [
            head,
            f"{markdown.table(columns, rows)}\n\n{costs}\n",
            "## A row of each task\n",
            markdown.table(["reward", "prompt", "right", "faults"], examples),
            "\n## Commands\n\nTASK is a name of the table, SEED is 0, 1 or 2, and REWARD is"
            f" that of the task: {terms.format(to='runs/every_reward')}. The coin's runs have"
            " `--reward coin`, and the task's reward with a weight of 0.\n",
            "```\n" + "\n".join(shown) + "\n```\n",
            *further(lines, "runs/every_reward"),
        ]
    )


FURTHER = """What has not run is missing, and a difference without an interval has one seed.

- Flipped pairs (D09): DPO learns from 224 pairs of a right and a faulty call. In the arm `flipped`,
  half of the pairs whose prompt has the word weather have their sides exchanged, as a hostile
  platform would do to one topic. The topic gains less than without the attack on every seed, but
  the interval over seeds has 0 in it; on other prompts nothing shows.
- Stable, then decay (E66): SFT at a constant rate for 250 steps, then 50 steps that continue its
  optimizer with a cosine decay, or, as the control, at the same rate.
- A transfer of skill (E50): what GRPO changed on `box_iou` is added to the SFT model of `action`,
  which began with the same random weights. No gain shows.
- Behavior by phrases (F27): the share of answers of `think_format` that compare two numbers,
  counted by `phrases(any_of=over)`, which a run reports with `--evaluation.metrics` and nothing
  rewards.
"""
CONTRASTS = (
    ("D09", "tool_calls", "dpo", "start", "weather"),
    ("D09", "tool_calls", "dpo", "start", "other prompts"),
    ("D09", "tool_calls", "flipped", "start", "weather"),
    ("D09", "tool_calls", "flipped", "start", "other prompts"),
    ("D09", "tool_calls", "flipped", "dpo", "weather"),
    ("D09", "tool_calls", "flipped", "dpo", "other prompts"),
    ("E66", "box_iou", "decayed", "stable", "all"),
    ("E66", "box_iou", "decayed", "constant", "all"),
    ("E50", "action", "transfer", "start", "all"),
    ("F27", "think_format", "grpo", "start", "phrases"),
    ("F27", "think_format", "coin", "start", "phrases"),
)
"""Method, task, its arm, what it is compared with, and the prompts or what is counted."""


def further(lines: list[dict[str, Any]], folder: str) -> list[str]:
    """Return the table of the further arms and their commands."""
    of_runs = {(line["name"], line["arm"], line["seed"]): line for line in lines}
    prompts = {task.name: [each.prompt for each in examples_of(task)[:HELD_OUT]] for task in TASKS}

    def value(name: str, arm: str, seed: int, what: str) -> float:
        line = of_runs[name, arm, seed]
        if what == "phrases":
            return float(np.mean(line["counts"]))
        is_weather = np.array(["weather" in prompt for prompt in prompts[name]])
        chosen = {"weather": is_weather, "other prompts": ~is_weather}.get(what, ...)
        return float(np.mean(np.array(line["rewards"])[chosen]))

    rows = []
    for ids, name, arm, base, what in CONTRASTS:
        seeds = [n for n in SEEDS if {(name, arm, n), (name, base, n)} <= of_runs.keys()]
        values, others = (
            np.array([value(name, each, seed, what) for seed in seeds]) for each in (arm, base)
        )
        if seeds:
            by_seed = ", ".join(f"{number:.2f}" for number in values)
            rows.append([ids, f"`{name}`", what, arm, by_seed, base, interval(values - others)])
    columns = ["shows", "task", "measured on", "arm", "each seed", "against", "difference"]
    shown = [flags_of(task, arm, 0, folder) for task in TASKS for arm in task.further]
    # Shorter: what all runs have is among the commands above.
    shown = [f"python launch/run.py {flags.replace(LENGTHS, '...')}" for flags in shown]
    shown = [line.replace("run.py combine", "combine.py --to DIR") for line in shown]
    title = "## Further arms\n"
    return [title, FURTHER, markdown.table(columns, rows), "\n```", *shown, "```\n"]


def code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    return f"`{text}`".replace("\n", "⏎").replace("|", "\\|")


def interval(values: np.ndarray) -> str:
    """Return the mean over seeds with its interval."""
    found = intervals.mean_estimate(values.tolist())
    if np.isnan(found.low):
        return f"{found.value:+.2f}"
    return f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, default=Path("runs/every_reward"))
    parser.add_argument("--only", nargs="+", default=[], help="tasks")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after these")
    parser.add_argument("--small", action="store_true", help="one step; results stay in --to")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    flags = parser.parse_args()
    if flags.page:
        PAGE.write_text(summarize(arms.read_lines(RESULTS)), encoding="utf-8")
        return
    results = flags.to / "results.jsonl" if flags.small else RESULTS
    run_all(flags.to, results, flags.only, flags.minutes, flags.small)


if __name__ == "__main__":
    main()
