"""Reports of synthetic runs: finished, unfinished, supervised and hostile."""

import json
import math
import re

import numpy as np
import pytest

from tests.fixtures.run_folders import (
    CONFIG,
    accuracy_row,
    make_run,
    sample,
    with_tokens,
    write_lines,
)
from tpu_rl import report
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.report import completion_pages, html_page, pictures
from tpu_rl.report.series import MAX_POINTS


def make_supervised_run(folder, steps: int = 12):
    """Write a run folder like that of SFT: no rewards, no samples, no evaluation."""
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "time": 1.7e9 + step,
            "sft/loss": 0.4 + 2 * math.exp(-4 * step / steps),
            "optim/grad_norm": 1.0,
            "time/step": 1.0,
            "time/update": 0.9,
            "perf/train_tokens_per_second": 9000.0,
        }
        for step in range(1, steps + 1)
    ]
    write_lines(folder / "metrics.jsonl", rows)
    return folder


REFRESH = '<meta http-equiv="refresh"'


def page(run_dir) -> str:
    """Return the page without its own script and what that reads, which are checked here."""
    report.write_report(run_dir)
    text = (run_dir / "report.html").read_text()
    assert text.count(f"<script>{html_page.SCRIPT}</script>") == 1
    text = text.replace(f"<script>{html_page.SCRIPT}</script>", "")
    part = text[text.index('<section id="explore">') :].partition("</section>")[0]
    assert part.count("<script type=") == part.count("<script") == 1
    assert len(part) < 200_000
    return text.replace(part, "")


def titles(text: str) -> list[str]:
    return re.findall(r"<figcaption><b>(.*?)</b>", text)


def test_page_of_a_finished_run(tmp_path):
    text = page(make_run(tmp_path / "arithmetic_grpo"))
    assert len(text) < 2_000_000
    assert "34.2<small>%" in text
    assert "81.2<small>%" in text
    assert "+47.0 points" in text
    assert "30.0–38.4" in text
    assert "500 problems" in text
    assert "40.0 → 85.0 %" in text
    for fact in (
        "arithmetic_grpo",
        "4.1 min",
        "2 CPU cores",
        "GRPO",
        "tiny-arithmetic",
        "9f2c" * 16,
        "clip_low",
    ):
        assert fact in text
    assert titles(text) == [
        "Reward",
        "Parts of the reward",
        "Rewards, early and late",
        "Completions with little to learn from",
        "Length",
        "Entropy",
        "Distance from the reference",
        "Clipped tokens",
        "Probability ratio",
        "KL to the old policy",
        "Sampler against trainer",
        "Gradient norm",
        "Learning rate",
        "Time per step",
        "Throughput",
    ]
    assert "The same prompts at the start and at the end" in text
    assert "completions whose reward failed</td><td>1<" in text


def test_page_needs_no_network_and_no_script(tmp_path):
    """Links lead to places of the page itself."""
    text = page(make_run(tmp_path / "run"))
    assert text.count("<svg") == len(titles(text)) + 1
    assert not re.findall(r"\bsrc=|\bhref=(?!\"#)|url\(|@import|<script|\bon\w+=", text)
    assert "default-src 'none'; style-src 'unsafe-inline'" in text


def test_page_of_an_unfinished_run_says_so(tmp_path):
    folder = make_run(tmp_path / "run", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "ti')  # A line that is being written.
    text = page(folder)
    assert "This run is not finished" in text
    assert "34.2<small>%" in text


def test_page_of_a_run_that_is_on_reloads_itself_until_the_end(tmp_path):
    folder = make_run(tmp_path / "run", finished=False)
    assert REFRESH not in page(folder)
    report.write_report(folder, live=True)
    text = (folder / "report.html").read_text()
    assert text.count(REFRESH) == 1
    assert "This run is not finished: step 12 ended on 2023-11-14 at 22:13 UTC." in text
    finished = make_run(tmp_path / "finished")
    report.write_report(finished, live=True)
    assert REFRESH not in (finished / "report.html").read_text()
    assert [path.name for path in folder.glob("report*")] == ["report.html"]


def test_summary_of_fewer_steps_does_not_finish_a_run(tmp_path):
    """A finished run that goes on with more --steps has the summary of its first steps."""
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_text(CONFIG.format(steps=24))
    text = page(folder)
    assert "This run is not finished" in text
    assert "12 of 24" in text


def test_page_of_a_run_of_one_step(tmp_path):
    folder = make_run(tmp_path / "run", steps=1, finished=False)
    assert "Reward" in titles(page(folder))


def test_page_of_a_supervised_run_shows_its_loss(tmp_path):
    folder = make_supervised_run(tmp_path / "run")
    nothing = {"accuracy": None, "low": None, "high": None, "n": 0}
    (folder / "summary.json").write_text(
        json.dumps({"steps": 12, "eval": {"before": nothing, "after": nothing}})
    )
    text = page(folder)
    assert titles(text) == ["Gradient norm", "Time per step", "Throughput"]
    assert "loss of the first and the last step" in text
    assert "accuracy" not in text


def test_metrics_without_a_chart_of_their_own_are_drawn(tmp_path):
    folder = make_supervised_run(tmp_path / "run")
    rows = [
        json.loads(line) | {"q/bellman_gap": 0.5}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    write_lines(folder / "metrics.jsonl", rows)
    assert "q/bellman_gap" in titles(page(folder))


def test_all_text_of_the_run_is_escaped(tmp_path):
    folder = make_run(tmp_path / "run")
    attack = "<script>alert(1)</script>&"
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {
            "prompt": attack + row["prompt"],
            "completion": attack,
            "parts": {attack: 1.0, "other": None},
        }
    write_lines(folder / "samples.jsonl", rows)
    (folder / "config.yaml").write_text(
        f"model: {{path: '{attack}'}}\nalgorithm: {{kind: '{attack}'}}\n"
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [
        json.loads(line) | {f"q/{attack}": 1.0, attack: None, "reward/$x_{/mean": 1.0}
        for line in lines
    ]
    write_lines(folder / "metrics.jsonl", rows)
    summary = json.loads((folder / "summary.json").read_text()) | {
        "device": attack,
        "params_digest": attack,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    text = page(folder)
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;") > 10


def test_names_in_charts_are_escaped(tmp_path):
    """Names of rewards and of guided models are labels, attributes, and texts below the pointer."""
    folder = make_run(tmp_path / "run")
    attack = "'\"><img src=x onerror=alert(1)>"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {f"reward/{attack}/mean": 1.0, f"q/{attack}": 1.0} for row in rows]
    write_lines(folder / "metrics.jsonl", rows)
    lines = [
        {"name": attack, "kl_coef": coefficient, "kl": kl, "accuracy": [0.5, 0.4, 0.6, 9]}
        for coefficient, kl in ((0.1, 2.0), (1.0, 0.5))
    ]
    (folder / "guided.json").write_text(json.dumps({"lines": lines}))
    text = page(folder)
    assert "<h2>Guidance</h2>" in text
    assert "<img" not in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") > 10
    assert attack[:4] not in text


def test_completions_of_different_prompts_when_none_recurs(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    write_lines(
        folder / "samples.jsonl",
        [row | {"prompt": f"{row['step']}: {row['prompt']}"} for row in rows],
    )
    assert "Prompts of the first and of the last steps" in page(folder)


def test_completions_without_a_reward_are_left_out(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [
        json.loads(line) | {"reward": None}
        for line in (folder / "samples.jsonl").read_text().splitlines()
    ]
    write_lines(folder / "samples.jsonl", rows)
    assert '<table class="samples"' not in page(folder)


def test_page_is_deterministic(tmp_path):
    folder = make_run(tmp_path / "run")
    assert page(folder) == page(folder)


def test_graded_rewards_have_their_mean_as_the_headline(tmp_path):
    """Nobody said which of these answers are right, so no page may call a share of them accuracy.
    At one step all rewards happened to be 0 or 1."""
    folder = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval/accuracy" in row]
    for index, row in enumerate(evaluated):
        value = 0.2 + 0.05 * index
        row |= {"eval/reward": value, "eval/reward_low": value - 0.1, "eval/reward_high": 0.9}
        row |= {"eval/n": 50}
        if index != 2:
            for end in ("", "_low", "_high"):
                del row[f"eval/accuracy{end}"]
        for name in [name for name in row if name.startswith("eval/greedy")]:
            del row[name]
    write_lines(folder / "metrics.jsonl", rows)
    text = page(folder)
    last = 0.2 + 0.05 * (len(evaluated) - 1)
    assert f"held-out mean reward before and after, {last - 0.2:+.3f}" in text
    assert f"95 % intervals 0.100–0.900 and {last - 0.1:.3f}–0.900, 50 problems" in text
    assert "Mean reward of held-out problems; band: 95 % interval." in text
    assert "ccuracy" not in text


def test_a_folder_without_metrics_raises_input_error(tmp_path):
    with pytest.raises(InputError, match="nothing to report"):
        report.write_report(tmp_path)


def accuracy_rows(folder, *measured: dict) -> None:
    """Add the metrics to the run's rows that have an evaluation, in order."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    evaluated = [row for row in rows if "eval/accuracy" in row]
    for row, names in zip(evaluated, measured, strict=False):
        row |= names
    write_lines(folder / "metrics.jsonl", rows)


@pytest.mark.parametrize(
    ("beside", "title", "change"),
    [
        (
            "length_only",
            "Share of held-out pairs ranked as labeled; band: 95 % interval.",
            "share of held-out pairs ranked as labeled, before and after, +47.0 points",
        ),
        (
            "majority",
            "Share of held-out steps judged as labeled; band: 95 % interval.",
            "share of held-out steps judged as labeled, before and after, +47.0 points",
        ),
    ],
)
def test_accuracy_of_ranking_is_not_that_of_answers(tmp_path, beside, title, change):
    folder = make_run(tmp_path / "run")
    accuracy_rows(folder, *[{f"eval/{beside}_accuracy": 0.6}] * 20)
    text = page(folder)
    assert title in text
    assert change in text
    assert "Accuracy on held-out problems" not in text
    assert "held-out accuracy" not in text


def test_stages_that_measure_different_things_are_not_one_curve(tmp_path):
    """A reward model's pairs come first: their share is neither the start nor the gain."""
    folder = make_run(tmp_path / "run")
    accuracy_rows(folder, *[{"eval/length_only_accuracy": 0.6}] * 3)
    text = page(folder)
    assert "Share of held-out pairs ranked as labeled" in titles(text)
    assert "Accuracy on held-out problems; band" in text
    assert "+47.0 points" not in text
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = [row for row in rows if "eval/accuracy" in row][3]["eval/accuracy"]
    assert f'<span class="before">{100 * first:.1f}<small>' in text


def test_reward_on_held_out_problems_is_drawn(tmp_path):
    folder = make_run(tmp_path / "run")
    reward = {"eval/reward": 0.7, "eval/reward_low": 0.6, "eval/reward_high": 0.8}
    accuracy_rows(folder, *[reward] * 20)
    text = page(folder)
    assert "Reward on held-out problems" in titles(text)
    assert "step 12 · 0.7 (0.6 to 0.8)" in text


def page_of(text: str, name: str) -> str:
    start = text.index(f'id="{name}"')
    return text[start : text.index("</article>", start)]


def test_points_of_curves_lead_to_steps_and_these_to_completions(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [
        with_tokens(sample(step, i, 12), ["ans", "wer", "\n", "<eos>", ""])
        for step in range(1, 13)
        for i in range(24)
    ]
    write_lines(folder / "samples.jsonl", rows)
    text = page(folder)
    links = re.findall(r'<a href="#(step-[0-9]+)" tabindex="-1"><i', figure(text, "Length"))
    assert links == [f"step-{step}" for step in range(1, 13)]
    assert 'href="#step-4-2"' in page_of(text, "step-4")
    completion = page_of(text, "step-4-2")
    assert "&lt;|user|&gt;19 + 29" in completion
    assert '<div class="tokens A3"><i title="log-prob -0 · entropy 0">ans</i>' in completion
    last = 'class="l2 e2 g3" title="log-prob -0.3 · entropy 0.3 · sampler-trainer gap 0.001"'
    assert f"<i {last}>&lt;eos&gt;</i>" in completion
    assert "<tr><td>correct</td><td>1</td></tr>" in completion
    assert "<tr><td>advantage</td><td>-0.8</td></tr>" in completion
    # Every link leads somewhere.
    targets = set(re.findall(r'\bid="([^"]*)"', text))
    assert set(re.findall(r'href="#([^"]*)"', text)) <= targets


def test_groups_stand_side_by_side_and_completions_are_found(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    rows = []
    for group in (0, 5):
        for place in range(4):
            tokens = ["a"] * (1 + place + group)
            row = with_tokens(sample(1, group, 1), tokens) | {"reward": place / 4 + group / 100}
            rows.append(row | {"group": group})
    write_lines(folder / "samples.jsonl", rows)
    text = page(folder)
    step = page_of(text, "step-1")
    first, second = step.split('<h3 class="group">')[1:]
    assert first.startswith("17 + 23 - 5")
    assert second.startswith("22 + 38 - 10")
    assert re.findall(r'href="#step-1-([0-9])"', first + second) == list("01234567")
    assert "advantage -0.8, 4 tokens" in first
    found = text.partition('<table class="plain found">')[2].partition("</table>")[0]
    order = [re.findall(r'href="#step-1-([0-9])"', line) for line in found.split("<tr>")[1:]]
    assert order == [list("73625"), list("04152"), list("76543"), list("01234")]
    assert "step 1: 0.8, 9 tokens" in found


def test_all_kept_completions_of_a_short_run_have_a_page_with_their_story(tmp_path):
    folder = make_run(tmp_path / "run", steps=40)
    call = {"function": {"name": "look_up", "arguments": "{}"}}
    talk = [{"role": "assistant", "content": "<b>", "tool_calls": [call]}, {"role": "tool"}, 7]
    rows = [
        sample(step, group, 40) | {"group": group, "reward": place / 4, "messages": talk}
        for step in range(1, 41)
        for group in range(8)
        for place in range(4)
    ]
    write_lines(folder / "samples.jsonl", rows)
    text = page(folder)
    assert len(re.findall(r'id="step-[0-9]+-[0-9]+"', text)) == 40 * 32
    assert len(text) < 1.3 * completion_pages.PAGE_BYTES
    completion = page_of(text, "step-7-31")
    assert "<tr><td>its group</td><td>0.75, 0.5, 0.25, 0; mean 0.375</td></tr>" in completion
    assert "<b>assistant</b> <span>&lt;b&gt;\n{&#34;function&#34;" in completion
    assert "look_up" in completion


def test_completions_whose_tokens_have_no_numbers_have_a_page_with_the_time_of_episodes(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    rows = [
        sample(1, place, 1) | {"group": place // 4, "seconds": {"policy": 1.5, "<tools>": 4.5}}
        for place in range(64)
    ]
    rows[0] = with_tokens(rows[0], ["4", "2"])
    write_lines(folder / "samples.jsonl", rows)
    text = page(folder)
    assert len(re.findall(r'id="step-1-[0-9]+"', text)) == 64
    last = page_of(text, "step-1-63")
    assert "<h3>Time, 6 s</h3>" in last
    assert '<rect class="c1" x="25.00" width="75.00" height="4">' in last
    assert "policy 1.5 s</span>" in last
    assert "&lt;tools&gt; 4.5 s</span>" in last


def test_the_time_of_an_episode_has_a_line_for_each_turn(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    waits = [["reset", 1], ["policy", 2], ["call", 3], ["policy", 1], ["reward", 1], ["policy", 0]]
    write_lines(folder / "samples.jsonl", [sample(1, 0, 1) | {"seconds": waits}])
    shown = page_of(page(folder), "step-1-0")
    assert "<h3>Time by turn, 8 s</h3>" in shown
    lines = re.findall(r'<svg viewBox="0 0 100 4" class="waits">.*?</svg>', shown)
    assert [re.findall("<title>(.*?)</title>", line) for line in lines] == [
        ["reset 1 s"],
        ["policy 2 s", "call 3 s"],
        ["policy 1 s", "reward 1 s"],
    ]
    assert 'class="c1" x="75.00" width="12.50"' in lines[2]
    assert "policy 3 s</span>" in shown


@pytest.mark.slow
def test_pages_of_long_completions_are_few_and_bounded(tmp_path):
    folder = make_run(tmp_path / "run", steps=100)
    rows = [
        with_tokens(sample(step, i, 100), [" word"] * 700)
        for step in range(1, 101)
        for i in range(4)
    ]
    write_lines(folder / "samples.jsonl", rows)
    text = page(folder)
    steps = [int(step) for step in re.findall(r'class="page" id="step-([0-9]+)"', text)]
    assert completion_pages.MIN_STEPS < len(steps) < 30
    assert steps[-4:] == [97, 98, 99, 100]
    assert text.count("<i title=") + text.count('<i class="l') < completion_pages.MAX_TOKENS + 99
    assert "The first 500 of 700 tokens" in text
    assert len(text) < 1.3 * completion_pages.PAGE_BYTES


def test_pages_of_a_large_file_are_spread_over_the_run(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_lines(path, [sample(step, i, 900) for step in range(1, 901) for i in range(3)])
    lines = path.read_text().splitlines(keepends=True)
    lines[1000] = "not a row\n"
    path.write_text("".join(lines) + '{"step": 901')
    steps = [samples[0]["step"] for samples in completion_pages.read_steps(path)]
    assert steps[0] == 1
    assert steps[-4:] == [897, 898, 899, 900]
    assert steps == sorted(set(steps))
    assert max(np.diff(steps[:-4])) < 100


def test_the_latest_steps_have_pages_also_if_they_are_large(tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"
    write_lines(path, [sample(step, i, 900) for step in range(1, 901) for i in range(3)])
    monkeypatch.setattr(completion_pages, "MAX_STEP_BYTES", 1200)
    steps = [samples[0]["step"] for samples in completion_pages.read_steps(path)]
    assert steps[-4:] == [897, 898, 899, 900]


@pytest.mark.parametrize(
    "tokens",
    [
        7,
        {"text": 3},
        {"text": ["<script>", 4], "log_prob": ["<script>", None], "advantage": "<script>"},
        {"text": ["a", "b"], "entropy": [1.0], "gap": {"<script>": 1}},
    ],
)
def test_odd_samples_are_shown_and_escaped(tmp_path, tokens):
    folder = make_run(tmp_path / "run")
    odd = {"tokens": tokens, "rendered": "<script>", "row": "<script>", "by": "<script>"}
    rows = [sample(step, 0, 12) | odd for step in range(1, 13)]
    write_lines(folder / "samples.jsonl", rows)
    text = page(folder)
    assert 'id="step-12-0"' in text
    assert "<script" not in text


PNG = b"\x89PNG" + bytes(50)
NAME = "0123456789abcdef.png"


def make_picture_run(folder, *changes):
    """Write a run whose samples have a picture of 200 x 100 pixels; return its page."""
    run_dir = make_run(folder)
    (run_dir / "pictures").mkdir()
    (run_dir / "pictures" / NAME).write_bytes(PNG)
    image = {"images": [{"file": NAME, "size": [200, 100]}]}
    rows = [sample(12, number, 12) | image | change for number, change in enumerate(changes)]
    write_lines(run_dir / "samples.jsonl", rows)
    return page(run_dir)


def test_pictures_stand_once_with_the_coordinates_of_answers(tmp_path):
    text = make_picture_run(
        tmp_path / "run",
        {"marks": {"completion": [20, 30], "answer": [10, 20, 40, 60]}},
        {"marks": {"completion": [0.5, 0.5], "answer": [500, 200, 900, 1000]}},
        {"marks": {"completion": [-1, 5], "answer": [1, 2, 3]}},
        {"marks": {"completion": "<script>", "answer": [5000, 5]}},
    )
    assert "img-src data:" in text
    assert text.count("data:image/png;base64,") == 1
    assert text.count(f'<use href="#picture-{NAME[:-4]}"') == 4
    assert '<circle cx="20" cy="30"' in text
    assert '<rect x="10" y="20" width="30" height="40"' in text
    assert '<circle cx="100" cy="50"' in text
    assert '<rect x="100" y="20" width="80" height="80"' in text
    assert text.count("in pixels") == 2
    assert text.count("in thousandths") == 1
    assert text.count("<circle") + text.count("<rect x") == 4
    assert "<script" not in text


@pytest.mark.parametrize(
    ("images", "note"),
    [
        ([{"file": "../secret.png", "size": [2, 2]}], "a picture that cannot be shown"),
        ([{"file": "00000000.png", "size": [2, 2]}], "there is no file 00000000.png"),
        ([{"error": "<script>"}], "&lt;script&gt;"),
        ([{"file": NAME, "size": [2, "x"]}, 7, None], "a picture that cannot be shown"),
        ("<script>", ""),
    ],
)
def test_pictures_that_are_not_there_are_said(tmp_path, images, note):
    text = make_picture_run(tmp_path / "run", {"images": images})
    assert note in text
    assert "data:image" not in text
    assert "<script" not in text


def test_pictures_of_a_page_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "MAX_BYTES", 10)
    text = make_picture_run(tmp_path / "run", {})
    assert "left out: the page shows at most" in text
    assert "data:image" not in text


def figure(text: str, title: str) -> str:
    start = text.index(f"<b>{title}</b>")
    return text[start : text.index("</figure>", start)]


def y_labels(chart: str) -> list[str]:
    return re.findall(r'<span class="y"[^>]*>([^<]*)<', chart)


def heights(chart: str) -> list[float]:
    """Return the vertical places of the chart's lines, in percent."""
    paths = re.findall(r'<path class="line [^"]*" d="M([^"]*)"', chart)
    return [float(point.split()[1]) for path in paths for point in path.split("L")]


def test_rounding_is_drawn_flat_with_ticks_that_differ(tmp_path):
    folder = make_run(tmp_path / "run")
    noise = np.random.default_rng(0)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [
        json.loads(line)
        | {
            "policy/kl_old": 4e-13 * noise.random(),
            "policy/ratio_max": 1 + 1e-5 * noise.random(),
            "policy/ratio_min": 1 - 1e-5 * noise.random(),
            "rollout/truncated": 0.0,
            "reward/zero_std_groups": 0.0,
        }
        for line in lines
    ]
    write_lines(folder / "metrics.jsonl", rows)
    text = page(folder)
    for title in ("KL to the old policy", "Probability ratio"):
        chart = figure(text, title)
        assert np.ptp(heights(chart)) < 1
        assert len(set(y_labels(chart))) == len(y_labels(chart)) >= 2
    shares = y_labels(figure(text, "Completions with little to learn from"))
    assert shares[0] == "0.00%"
    assert not any(label.startswith("-") for label in shares)


def test_charts_show_numbers_where_the_pointer_is(tmp_path):
    text = page(make_run(tmp_path / "run"))
    hovers = re.findall(r"<b>([^<]*)</b></i>", figure(text, "Length"))
    assert len(hovers) == 12
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[3])
    mean, longest = row["rollout/length_mean"], row["rollout/length_max"]
    assert hovers[2] == f"step 3 · mean {mean:.4g} · longest {longest:.4g}"


@pytest.mark.slow
def test_long_runs_have_small_pages(tmp_path):
    text = page(make_run(tmp_path / "run", steps=3000))
    assert len(text) < completion_pages.PAGE_BYTES
    assert "steps 1 to 25, mean" in figure(text, "Length")


def test_page_of_a_run_whose_numbers_are_missing(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [
        row | {"eval/accuracy_low": None, "policy/entropy": math.nan, "optim/grad_norm": None}
        for row in rows
    ]
    write_lines(folder / "metrics.jsonl", rows)
    text = page(folder)
    assert "Entropy" not in titles(text)
    assert "Gradient norm" not in titles(text)
    assert "nan" not in text.partition("</style>")[2]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": 1}\nno json\n'),
        ("metrics.jsonl", "[1]\n"),
        ("samples.jsonl", '{"prompt": ""}\n'),
        ("metrics.jsonl", '{"step": 1}\n'),
        ("summary.json", "{"),
        ("summary.json", "[]"),
        ("config.yaml", "a: [1"),
        ("config.yaml", "text"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    folder = make_run(tmp_path / "run")
    (folder / name).write_text(content)
    with pytest.raises(DamagedDataError, match=name):
        report.write_report(folder)


def test_samples_of_the_first_and_of_the_last_tenth_of_the_steps_are_compared(tmp_path):
    folder = make_run(tmp_path / "run", steps=40)
    steps = completion_pages.read_steps(folder / "samples.jsonl")
    early, late = completion_pages.early_and_late(steps)
    assert {row["step"] for row in early} == {1, 2, 3, 4}
    assert {row["step"] for row in late} == {37, 38, 39, 40}
    assert [row["prompt"] for row in late[:24]] == [sample(37, i, 40)["prompt"] for i in range(24)]


def test_few_sampled_steps_are_early_or_late_and_not_both(tmp_path):
    """Q# samples in rounds: 3 of 200 steps have completions."""
    folder = make_run(tmp_path / "run", steps=200)
    rows = [sample(step, i, 200) for step in (1, 80, 160) for i in range(8)]
    write_lines(folder / "samples.jsonl", rows)
    steps = completion_pages.read_steps(folder / "samples.jsonl")
    early, late = completion_pages.early_and_late(steps)
    assert {row["step"] for row in early} == {1}
    assert {row["step"] for row in late} == {160}


def test_a_run_with_more_evaluations_than_points_of_a_chart(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": step, "time": 1.7e9 + step, **accuracy_row(step / 700)} for step in range(601)]
    write_lines(folder / "metrics.jsonl", rows)
    (curve,) = re.findall(r'<path class="line main c0" d="M(.*?)"', page(folder))
    assert curve.count("L") == MAX_POINTS - 1
