"""What MkDocs asks for while it builds the site (`make docs`, `make check`).

Pages link to each other and to the source with paths relative to their own file, as GitHub shows
them. The site has only what lies in docs/, so here pages from elsewhere are adopted
(`ADOPTED`), and a file of the source that a page links to is copied into the site as text. A link
to a file that does not exist, and a code span that names one, is a warning, which strict mode makes
an error.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
ADOPTED: Final = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "examples/README.md": "examples.md",
    "mem_cache/README.md": "memory-account.md",
}
"""Pages outside docs/, by their path in the repository: what they are called in the site."""

_LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_PATH: Final = re.compile(r"`([\w.-]+(?:/[\w.-]+)+(?:\.(?:py|md|proto|toml|json|yml)|/))`")
_NAME: Final = re.compile(r"`(\w+\.(?:py|proto))`")
_FENCE: Final = re.compile(r"^( *)(```|~~~).*?^\1\2[`~]*$", re.MULTILINE | re.DOTALL)
_GENERATED_PATHS: Final = ("site/", "build/", "dist/")
_log: Final = logging.getLogger("mkdocs.hooks.kvrelay")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and every file of the source that a page links to."""
    for path, name in ADOPTED.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    for page in files.documentation_pages():
        assert page.abs_src_path is not None
        source = _repository_path(page.src_uri)
        for _, link in _LINK.findall(_outside_fences(Path(page.abs_src_path).read_text())):
            target = _target(source, link)
            if target is None or _page_of(target) or not (ROOT / target).is_file():
                continue
            name = _copied(target)
            if files.get_file_from_path(name) is None:
                content = (ROOT / target).read_bytes()
                files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links within the repository into links within the site, and check named paths."""
    source = _repository_path(page.file.src_uri)
    text = _outside_fences(markdown)
    for path in _PATH.findall(text) + _NAME.findall(text):
        if not path.startswith(_GENERATED_PATHS) and not _exists(path):
            _log.warning("%s names `%s`, which does not exist", source, path)
    pieces = []
    end = 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_rewritten(markdown[end : fence.start()], source, page), fence[0]]
        end = fence.end()
    return "".join([*pieces, _rewritten(markdown[end:], source, page)])


def _rewritten(text: str, source: str, page: Page) -> str:
    def replace(match: re.Match[str]) -> str:
        label, link = match.groups()
        target = _target(source, link)
        if target is None:
            return match[0]
        if not (ROOT / target).exists():
            _log.warning("%s links to %s, which does not exist", source, link)
            return match[0]
        if (ROOT / target).is_dir():
            index = f"{target}/README.md"
            if index not in ADOPTED:
                return label
            target = index
        name = _page_of(target) or _copied(target)
        _, mark, anchor = link.partition("#")
        here = dirname(page.file.src_uri) or "."
        return f"[{label}]({relpath(name, here)}{mark}{anchor})"

    return _LINK.sub(replace, text)


def _repository_path(src_uri: str) -> str:
    """Where a page of the site lies in the repository."""
    for path, name in ADOPTED.items():
        if name == src_uri:
            return path
    return f"docs/{src_uri}"


def _target(source: str, link: str) -> str | None:
    """What a page links to, as a path in the repository; None: another host, or itself."""
    path = link.partition("#")[0]
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    return normpath(f"{dirname(source) or '.'}/{path}")


def _page_of(target: str) -> str | None:
    """The site's name of a page in the repository; None: it is no page of the site."""
    if target in ADOPTED:
        return ADOPTED[target]
    return target.removeprefix("docs/") if re.match(r"docs/.*\.md$", target) else None


def _copied(target: str) -> str:
    """The site's name of a file of the source: text, so that a browser shows it."""
    return f"source/{target}.txt"


def _exists(path: str) -> bool:
    """Whether a path from the root, or a file's bare name, is there."""
    return (ROOT / path).exists() if "/" in path else path in _file_names()


@functools.cache
def _file_names() -> frozenset[str]:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    return frozenset(path.name for folder in folders for path in folder.rglob("*.*"))


def _outside_fences(markdown: str) -> str:
    return _FENCE.sub("", markdown)
