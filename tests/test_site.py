"""The documentation site, which `make docs` builds: it lists the public surface, and leaves out no page of docs/."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import ndtp

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
SITE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SITE)


@pytest.mark.parametrize("package", SITE.PACKAGES)
def test_reference_has_every_public_name(package):
    """Each name stands there by the module that defines it, which has a docstring for it to show."""
    module = importlib.import_module(package)
    homes = SITE.public_names(package)
    assert sorted(homes) == sorted(module.__all__)
    for name, home in homes.items():
        place, _, attribute = home.rpartition(".")
        found = getattr(importlib.import_module(place), attribute)
        assert found is getattr(module, name) and found.__doc__, home
        assert f"::: {home}" in SITE.reference()


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert listed == pages | {"index.md", "reference.md", "changelog.md"}


def test_dir_is_the_public_surface_and_nothing_else():
    shown = {name for name in dir(ndtp) if not name.startswith("__")}
    assert shown == {*ndtp.__all__, "checkpoint", "nn", "testing"}
    assert all(getattr(ndtp, name) is not None for name in shown)


def test_links_of_the_front_page_lead_to_pages():
    class Files:
        src_uris = ("models.md", "index.md")

    text = "[a](../README.md#install) [b](models.md#x) [c](../ndtp/algebra/layout.py) [d](https://x.org) [e](#here)"
    turned = SITE.on_page_markdown(text, None, None, Files)
    assert turned == "[a](index.md#install) [b](models.md#x) c [d](https://x.org) [e](#here)"
