"""A hook of mkdocs: `docs/autocast.md` in a docstring becomes a link to that page."""

import re
from typing import Any

from mkdocs.utils import get_relative_url


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Links the guides that docstrings name. A guide that does not exist is an error."""

    def link(found: re.Match[str]) -> str:
        guide = files.get_file_from_path(found[1])
        if guide is None:
            raise ValueError(f"{page.file.src_path}: there is no page docs/{found[1]}.")
        return f'<a href="{get_relative_url(guide.url, page.url)}">{found[0]}</a>'

    return re.sub(r"docs/([\w/-]+\.md)", link, html) if page.file.src_path.startswith("api/") else html
