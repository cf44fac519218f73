"""Collects the pages of the site: those of docs/, files elsewhere that they link to, and the API.

Usage: `python docs/site/pages.py FOLDER`. The pages of docs/ are written for a forge, where a link
may lead to any file of the repository. Here such a file becomes a page of its own, so that the site
is complete without the repository.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import api_pages

ROOT = Path(__file__).parents[2]
# Pages of the repository's root that are pages of the site, whether or not something links to them.
FROM_ROOT = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
_ORPHAN = "---\norphan: true\n---\n\n"  # a page that links lead to, but no menu
_CONTENTS = "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"  # the other pages of a folder
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
# A doctest ends with an empty line, which a reader does not need.
_EMPTY_LAST_LINES = re.compile(r"(^```pycon\n.*?\n)\n+(?=```$)", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".csv": "text"}


def collect(root: Path = ROOT) -> dict[PurePosixPath, str | Path]:
    """Returns all pages and images by path: a text, or the file to copy."""
    docs = root / "docs"
    pages: dict[PurePosixPath, str | Path] = {}
    todo = [docs / path for path in _files(docs) if path.parts[0] != "site"]
    todo += [root / name for name in FROM_ROOT if (root / name).exists()]
    seen: set[Path] = set(todo)
    while todo:
        source = todo.pop()
        place = place_of(source, root)
        if source.suffix == ".md":
            text = _EMPTY_LAST_LINES.sub(r"\1", source.read_text(encoding="utf-8"))
            text, targets = with_site_links(text, source, root)
            if place.parts[0] == "files":
                text = _ORPHAN + text
            elif source.name == "README.md":
                text += _CONTENTS
            pages[place] = text
            todo += [target for target in targets if target not in seen]
            seen |= set(targets)
        elif source.is_relative_to(docs):
            pages[place] = source
        else:
            pages[place] = _listing(source, root)
    return pages


def place_of(source: Path, root: Path) -> PurePosixPath:
    """Returns the path in the site of the page that shows a file or folder of the repository."""
    path = PurePosixPath(source.relative_to(root).as_posix())
    if path.parts[0] == "docs":
        return path.relative_to("docs")
    if str(path) == "README.md":
        return PurePosixPath("index.md")
    if str(path) in FROM_ROOT:
        return PurePosixPath(FROM_ROOT[str(path)])
    return PurePosixPath("files") / (path if path.suffix == ".md" else f"{path}.md")


def with_site_links(text: str, source: Path, root: Path) -> tuple[str, list[Path]]:
    """Returns a page with its links as they are in the site, and the linked files outside docs/."""
    outside: list[Path] = []
    folder = place_of(source, root).parent

    def rewritten(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = (source.parent / path).resolve()
        if "://" in path or not target.exists() or not target.is_relative_to(root):
            return match[0]
        if not target.is_relative_to(root / "docs") and target != root / "README.md":
            outside.append(target)
        return f"]({os.path.relpath(place_of(target, root), folder)}{anchor})"

    return _LINK.sub(rewritten, text), outside


def _listing(source: Path, root: Path) -> str:
    """Returns a page with the text of a file, or of all files of a folder."""
    name = source.relative_to(root).as_posix()
    files = [source] if source.is_file() else [source / path for path in _files(source)]
    text = f"{_ORPHAN}# {name}\n"
    for file in files:
        content = file.read_text(encoding="utf-8").rstrip("\n")
        if file != source:
            text += f"\n## {file.relative_to(source).as_posix()}\n"
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", content)), default=0))
        text += f"\n{fence}{_LANGUAGES.get(file.suffix, 'text')}\n{content}\n{fence}\n"
    return text


def _files(folder: Path) -> Iterator[PurePosixPath]:
    """Yields the files below a folder, without those that running the code leaves behind."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not any(
            part.startswith(".") or part in ("__pycache__", "runs") for part in inside.parts
        ):
            yield PurePosixPath(inside.as_posix())


def write(pages: dict[PurePosixPath, str | Path], folder: Path) -> None:
    """Makes the folder contain these pages; leaves files alone that are the same already."""
    wanted = {folder / path for path in pages}
    for path, content in pages.items():
        data = content.encode() if isinstance(content, str) else content.read_bytes()
        file = folder / path
        if not file.exists() or file.read_bytes() != data:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        if file not in wanted:
            file.unlink()


def main() -> None:
    (folder,) = sys.argv[1:]
    write(collect() | api_pages.collect(), Path(folder))


if __name__ == "__main__":
    main()
