"""report.html in a real browser. Debian's package is chromium; without one, this is skipped."""

import json
import time

import pytest

from tests.fixtures import browser
from tests.fixtures.run_folders import make_run, sample, with_tokens, write_lines
from tpu_rl import report
from tpu_rl.report import page as report_page

pytestmark = pytest.mark.skipif(
    browser.executable() is None, reason="there is no chromium: apt-get install chromium"
)
ATTACK = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>\"'>"
STEPS = 12


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.open_page(tmp_path_factory.mktemp("browser")) as page:
        page.resize(1100)
        yield page


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Return a finished run, one of whose tokens, prompts and rewards is hostile."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", steps=STEPS)
    long_word = "x" * 300
    texts = ["4", "2", ATTACK, "\n", long_word, " is", " the", " answer", "<eos>"]
    rows = [
        with_tokens(sample(step, i, STEPS), texts) for step in range(1, STEPS + 1) for i in range(8)
    ]
    for row in rows:
        row["rendered"] = f"{ATTACK} {long_word}"
        row["parts"] |= {ATTACK: 0.5}
    write_lines(folder / "samples.jsonl", rows)
    report.write_report(folder)
    return folder


def is_shown(page, selector: str) -> bool:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).offsetHeight > 0")


def test_a_page_is_drawn_without_complaints(page, run_dir):
    page.open(run_dir / "report.html")
    assert page.log == []
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    heights = page.evaluate("[...document.querySelectorAll('.chart')].map(c => c.offsetHeight)")
    assert len(heights) > 10
    assert min(heights) > 100
    bars = "[...document.querySelectorAll('.chart .bar, .chart .line')]"
    assert page.evaluate(f"{bars}.every(mark => getComputedStyle(mark).display != 'none')")
    assert not is_shown(page, ".page")
    assert not is_shown(page, ".colors")
    assert page.evaluate("window.attacked") is None


def test_two_clicks_lead_from_a_curve_to_the_tokens_of_a_completion(page, run_dir):
    page.open(run_dir / "report.html")
    page.click(".chart a[href='#step-7'] i")
    page.wait_for("location.hash == '#step-7'")
    assert is_shown(page, "#step-7")
    assert not is_shown(page, "header")
    page.click("#step-7 .list a")
    page.wait_for("location.hash == '#step-7-0'")
    assert is_shown(page, "#step-7-0 .tokens")
    assert is_shown(page, "#step-7-0 table")
    assert not is_shown(page, "#step-7")

    clear = "rgba(0, 0, 0, 0)"
    first, last = "#step-7-0 .tokens i:first-child", "#step-7-0 .tokens i:last-child"
    by_log_prob = page.style(last, "background-color")
    assert by_log_prob != clear
    assert page.style(first, "background-color") == clear
    colors = {by_log_prob}
    for letter in "aeg":
        page.click(f"label[for=by-{letter}]")
        page.wait_for(f"document.querySelector('#by-{letter}').checked")
        colors.add(page.style(last, "background-color"))
        assert is_shown(page, f".legend-{letter}")
    assert len(colors) == 4
    # All tokens share the advantage.
    page.click("label[for=by-a]")
    assert page.style(first, "background-color") == page.style(last, "background-color") != clear
    page.evaluate("history.go(-2)")
    page.wait_for("location.hash == ''")
    assert is_shown(page, "header")
    assert not is_shown(page, "#step-7-0")
    assert page.evaluate("window.attacked") is None
    assert page.log == []


@pytest.mark.parametrize("fragment", ["", "#step-7", "#step-7-0"])
def test_a_phone_does_not_scroll_sideways(page, run_dir, fragment):
    page.resize(360)
    page.open(run_dir / "report.html", fragment)
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    page.resize(1100)
    assert widths == [360, 360]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Return the page of four runs, one of which has a hostile name and one is not finished."""
    folder = tmp_path_factory.mktemp("several")
    names = ["first", "second", "a_name_that_is_longer_than_a_phone_is_wide_" * 3, "<img src=x>"]
    runs = [make_run(folder / name, finished=name != "second") for name in names]
    file = folder / "comparison.html"
    file.write_text(report.build_comparison(runs), encoding="utf-8")
    return file


def test_four_runs_have_a_line_each_on_one_page(page, comparison):
    page.open(comparison)
    assert page.log == []
    heights = page.evaluate("[...document.querySelectorAll('.chart')].map(c => c.offsetHeight)")
    assert len(heights) > 5
    assert min(heights) > 100
    assert page.evaluate("document.querySelectorAll('header tr').length") == 5
    assert "not finished" in page.evaluate("document.querySelector('header').textContent")
    colors = page.evaluate(
        "[...new Set([...document.querySelectorAll('.chart')][0].querySelectorAll('.line'))]"
        ".map(line => getComputedStyle(line).stroke)"
    )
    assert len(set(colors)) == len(colors) == 4


@pytest.mark.parametrize("width", [1100, 360])
def test_the_page_of_several_runs_does_not_scroll_sideways(page, comparison, width):
    page.resize(width)
    page.open(comparison)
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    page.resize(1100)
    assert widths[0] <= widths[1] == width  # At a desk the scrollbar takes a part.


def test_the_page_is_dark_where_the_system_is(page, run_dir):
    def luminance(selector: str, name: str) -> float:
        color = page.style(selector, name)
        red, green, blue = (int(x) for x in color[color.index("(") + 1 : -1].split(",")[:3])
        return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255

    page.open(run_dir / "report.html", "#step-7-0")
    for scheme, is_dark in (("light", False), ("dark", True)):
        page.prefer(scheme)
        paper = luminance("body", "background-color")
        ink = luminance("#step-7-0 .tokens", "color")
        assert (paper < 0.2) == is_dark
        assert abs(paper - ink) > 0.6


@pytest.mark.slow
def test_a_live_page_reloads_itself_and_stops_at_the_end(page, run_dir, tmp_path, monkeypatch):
    """It stays as it is while one reads a completion, and loads no other script."""
    folder = make_run(tmp_path / "run", finished=False)
    (folder / "samples.jsonl").write_bytes((run_dir / "samples.jsonl").read_bytes())
    monkeypatch.setattr(report_page, "REFRESH_SECONDS", 1)
    report.write_report(folder, live=True)
    page.open(folder / "report.html")
    page.evaluate("window.isOld = true")
    page.wait_for("!window.isOld && document.querySelector('h1') != null")
    page.evaluate("location.hash = '#step-9-0'; window.isOld = true")
    time.sleep(2.5)
    assert page.evaluate("window.isOld")
    assert is_shown(page, "#step-9-0")
    assert page.evaluate("window.attacked") is None
    page.click("#step-9-0 nav a")
    page.wait_for("!window.isOld && document.querySelector('h1') != null")
    # The end of the run.
    report.write_report(make_run(tmp_path / "finished"))
    (tmp_path / "finished" / "report.html").replace(folder / "report.html")
    page.wait_for("document.querySelector('h1')?.textContent == 'finished'")
    assert page.evaluate("document.head.querySelector('script')") is None  # Nothing reloads it.
    assert page.log == []


CHOOSE = """(y, x) => {
  const form = document.querySelector('#explore form');
  form.elements.y.value = y; form.elements.x.value = x;
  form.dispatchEvent(new Event('input'));
  return [...document.querySelectorAll('#explore svg > .line, #explore svg > circle')].length;
}"""


def test_any_metric_is_drawn_over_any_axis_and_seeds_as_one_line(page, tmp_path):
    runs = []
    for rate, seed in ((0.1, 1), (0.1, 2), (0.2, 1)):
        run = make_run(tmp_path / f"rate{rate}_seed{seed}", steps=STEPS)
        text = f"seed: {seed}\noptimizer: {{learning_rate: {rate}}}\nsame: 1\n"
        (run / "config.yaml").write_text(text)
        runs.append(run)
    file = tmp_path / "comparison.html"
    file.write_text(report.build_comparison(runs), encoding="utf-8")
    page.open(file)
    assert page.log == []
    for axis in "012":
        assert page.evaluate(f"({CHOOSE})('reward/mean', '{axis}')") == 3
    assert page.evaluate(f"({CHOOSE})('reward/mean', 'soptimizer.learning_rate')") == 3
    assert page.evaluate("document.querySelectorAll('#explore svg circle').length") == 3
    assert page.evaluate(f"({CHOOSE})('reward/mean', 'p')") == 3
    texts = page.evaluate(
        "[...document.querySelectorAll('#explore svg text')].map(t => t.textContent)"
    )
    assert {"seed", "optimizer.learning_rate", "last reward/mean", "0.1", "0.2"} <= set(texts)
    assert "2 of 2 settings" in page.evaluate(
        "document.querySelector('#explore .keys').textContent"
    )
    page.evaluate("document.querySelector('[name=seeds]').checked = true")
    assert page.evaluate(f"({CHOOSE})('reward/mean', '0')") == 2
    assert page.evaluate("document.querySelectorAll('#explore svg .band').length") == 2
    settings = page.evaluate("document.querySelectorAll('section')[1].textContent")
    assert "optimizer.learning_rate0.10.10.2" in settings
    assert "1 equal settings" in settings


def test_the_table_of_runs_is_sorted_by_a_click(page, comparison):
    page.open(comparison)
    names = "[...document.querySelectorAll('.sortable td:first-child')].map(c => c.textContent)"
    click = "document.querySelector('.sortable th').click()"
    page.evaluate(click)
    rising = page.evaluate(names)
    page.evaluate(click)
    assert page.evaluate(names) == rising[::-1] != rising


FIND = """(text, low, high) => {
  const form = document.querySelector('#search');
  Object.assign(form.elements.text, {value: text});
  form.elements.low.value = low; form.elements.high.value = high;
  form.dispatchEvent(new Event('input'));
  const shown = [...document.querySelectorAll('#found li:not([hidden])')];
  return [document.querySelector('#count').textContent, shown.length];
}"""


def test_completions_are_found_by_text_reward_prompt_and_tag(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    rows = [sample(step, i, 3) | {"reward": i / 10} for step in (1, 2, 3) for i in range(8)]
    rows[5] |= {"completion": "needle in hay", "by": "opponent"}
    rows[6] |= {"completion": f"{'long ' * 50} thread"}
    write_lines(folder / "samples.jsonl", rows)
    report.write_report(folder)
    page.open(folder / "report.html")
    for words, low, high, count in (
        ("", "", "", 24),
        ("NEEDLE hay", "", "", 1),
        ("thread", "", "", 1),
        ("opponent", "", "", 1),
        ("23 + 41", "", "", 3),
        ("", 0.25, 0.45, 6),
        ("needle", 0.6, "", 0),
    ):
        found = page.evaluate(f"({FIND})({json.dumps(words)}, '{low}', '{high}')")
        assert found == [f"{count} completions", count]
    assert page.log == []
