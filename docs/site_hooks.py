"""Hooks of mkdocs: pages of the site that are files beside docs/, and the links from and to them.

README.md, CHANGELOG.md and other files stay where GitHub expects them. On the site they are pages,
too. Links are written for GitHub, and translated here.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.md",
    "recipes/README.md": "recipes.md",
    "recipes/grpo_from_parts.py": "grpo_from_parts.md",
}
"""File in the root of the repository -> its page on the site."""

LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
"""A link or an image of Markdown, with a target that is not a section of the same page."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of files beside docs/."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        if name.endswith(".py"):
            text = f"# {Path(name).name}\n\n```python\n{text}```\n"
        elif not name.endswith(".md"):
            # Not a fenced block: its [brackets] would be read as references.
            escaped = html.escape(text).replace("[", "&#91;").replace("\n\n", "\n&#8203;\n")
            text = f"# License\n\n<pre>{escaped}</pre>\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_config(config: Any) -> Any:
    """Link the repository, if CITATION.cff has its address."""
    config["repo_url"] = repository()
    return config


def repository() -> str | None:
    """Read the public address of the repository; None before there is one."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    found = re.search(r"^repository-code: (\S+)", text, re.MULTILINE)
    return found and found[1]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Translate the links of a page. The search finds pages that say how to do a thing first."""
    del config, files
    if page.file.src_uri.startswith("how-to/"):
        page.meta["search"] = {"boost": 3}
    source = {site: name for name, site in PAGES.items()}.get(page.file.src_uri)
    source = source or f"docs/{page.file.src_uri}"
    return translate(markdown, source, page.file.src_uri)


def translate(markdown: str, source: str, page: str) -> str:
    """Return a text whose relative links lead to pages of the site.

    Args:
        markdown: the text.
        source: the place of its file in the repository, from which its links lead.
        page: the place of its page in the site.
    """

    def site_link(match: re.Match[str]) -> str:
        begin, link, end = match.groups()
        if re.match(r"[a-z]+:|/", link):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        target = PAGES.get(target, target.removeprefix("docs/"))
        return begin + posixpath.relpath(target, posixpath.dirname(page) or ".") + end

    return LINK.sub(site_link, markdown)
