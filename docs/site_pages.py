"""The pages of the documentation site that are no files of docs/: the front page, the change log, the API reference.

mkdocs calls `on_files` and `on_page_markdown` (see mkdocs.yml).  Links of the README lead to the site's pages, and
links to files of the repository, which the site does not have, become the names of these files.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "ndtp": "ndtp/__init__.py",
    "ndtp.nn": "ndtp/nn/__init__.py",
    "ndtp.testing": "ndtp/testing/__init__.py",
    "ndtp.checkpoint": "ndtp/checkpoints/checkpoint.py",
    "ndtp_kernels": "kernels/ndtp_kernels/__init__.py",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def public_names(package: str) -> dict[str, str]:
    """Return the public names of a package, in order, with the modules that define them; nothing is imported."""
    tree = ast.parse((ROOT / PACKAGES[package]).read_text())
    homes: dict[str, str] = {}
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            homes.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Assign):
            value = {"__all__": list, "_HOME": dict}.get(getattr(node.targets[0], "id", ""))
            if value is list:
                names = list(ast.literal_eval(node.value))
            elif value is dict:  # of names that are imported when they are used
                lazy = ast.literal_eval(node.value)
                homes.update({name: f"{package}.{home}.{name}" for name, home in lazy.items()})
    return {name: homes[name] for name in names}


def reference() -> str:
    """Return the page of all public names, each with its docstring."""
    parts = [
        "# API reference",
        "",
        "Every public name, with its shapes and errors. Other names are private.",
    ]
    for package in PACKAGES:
        parts += ["", f"## {package}"]
        for home in public_names(package).values():
            parts += ["", f"::: {home}"]
    return "\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made: mkdocs calls this with the files of docs/."""
    from mkdocs.structure.files import File

    made = {"reference.md": reference()}
    for name, source in (("index.md", "README.md"), ("changelog.md", "CHANGELOG.md")):
        text = (ROOT / source).read_text()
        made[name] = text.replace("](docs/", "](").replace('src="docs/', 'src="')
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files of the repository into the files' names, and links to the README into the front page."""

    def turned(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        if path.endswith("README.md"):
            return f"[{text}](index.md{'#' + anchor if anchor else ''})"
        if path.endswith(("CHANGELOG.md", "CONTRIBUTING.md")):
            return f"[{text}]({'changelog' if 'CHANGE' in path else 'contributing'}.md)"
        is_elsewhere = path and "://" not in path and path not in files.src_uris
        return text if is_elsewhere else match[0]

    return LINK.sub(turned, markdown)
