"""Check the built documentation: each link within the site leads to a page, and to a place in it.

python tools/check_site.py build/docs
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """A page with the places in it, and what it links to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.places.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken(folder: Path) -> list[str]:
    """Describe the links of a site that lead nowhere.

    Args:
        folder: the folder of the site.
    """
    pages = {file.resolve(): Page(file) for file in sorted(folder.rglob("*.html"))}
    found = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            # A picture has no places that a link names.
            places = pages[target].places if target in pages else {unquote(parts.fragment)}
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in places):
                found.append(f"{file.relative_to(folder.resolve())}: {link}")
    return found


def main(arguments: list[str]) -> int:
    """Print the broken links of a site; return 0 if there is none."""
    (folder,) = map(Path, arguments)
    found = broken(folder)
    print("\n".join(found) or f"all links in {folder} lead somewhere")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
