"""The documentation site: built strictly, complete, and loading nothing from another host."""

import html
import html.parser
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

import evenstep
from evenstep.cli import main

ROOT = Path(__file__).parents[1]
HOOKS = ROOT / "docs" / "_site" / "hooks.py"
LOADING = {
    "audio",
    "embed",
    "iframe",
    "img",
    "input",
    "object",
    "script",
    "source",
    "track",
    "video",
}
LINKED = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
FROM_ELSEWHERE = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']+")
PAGES_WITHOUT_LINKS = {"404.html"}  # its links begin at the site's root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(310)]  # the build
mkdocs = pytest.importorskip("mkdocs", reason="pip install '.[docs]'")
pytest.importorskip("mkdocstrings_handlers.python", reason="pip install '.[docs]'")
pytest.importorskip("material", reason="pip install '.[docs]'")


class Page(html.parser.HTMLParser):
    """What one page links to, what it loads, and the places in it."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.ids, self.policies = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = {name: value or "" for name, value in attrs}
        self.ids |= {named.get("id", ""), named.get("name", "")}
        if tag in LOADING:
            sources = [named.get("src", ""), named.get("data", "") if tag == "object" else ""]
            self.loads += [*sources, *re.findall(r"[^\s,]+:\S+", named.get("srcset", ""))]
        if tag == "link" and LINKED & set(named.get("rel", "").split()):
            self.loads.append(named.get("href", ""))
        if tag == "meta" and named.get("http-equiv") == "Content-Security-Policy":
            self.policies.append(named["content"])
        self.loads += FROM_ELSEWHERE.findall(named.get("style", ""))
        self.links += [named[name] for name in ("href", "src") if named.get(name)]


def is_elsewhere(address):
    return bool(urlsplit(address).netloc) or bool(FROM_ELSEWHERE.search(address))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    found = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    assert len(found) > 40
    return found


def test_no_page_loads_anything_from_another_host(pages):
    loaded = {(path.name, one) for path, page in pages.items() for one in page.loads}
    assert len(loaded) > len(pages)
    assert [one for one in loaded if is_elsewhere(one[1])] == []


def test_a_browser_would_refuse_to(pages):
    for path, page in pages.items():
        (policy,) = page.policies
        assert policy.startswith("default-src "), path
        assert "//" not in policy


def test_no_stylesheet_loads_anything_from_another_host(site, pages):
    sheets = sorted(site.rglob("*.css"))
    assert sheets
    for path in [*sheets, *pages]:
        assert not FROM_ELSEWHERE.search(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<img src="//cdn.example/a.png">',
        '<img srcset="https://cdn.example/a.png 2x">',
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<link rel="preconnect" href="https://fonts.example">',
        '<p style="background: url(https://cdn.example/a.png)">',
    ],
)
def test_what_loads_from_another_host_would_be_found(text):
    assert any(is_elsewhere(one) for one in Page(text).loads)


def test_every_link_leads_to_a_place_in_the_site(site, pages):
    """Also those in HTML, which the strict build does not look at."""
    lost = []
    for path, page in pages.items():
        for link in page.links if path.name not in PAGES_WITHOUT_LINKS else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            known = target in pages and (not parts.fragment or parts.fragment in pages[target].ids)
            if not (known or (target.is_file() and target not in pages)):
                lost.append((path.relative_to(site).as_posix(), link))
    assert lost == []


def test_the_reference_has_every_public_name(pages):
    ids = set().union(*(page.ids for path, page in pages.items() if "reference" in path.parts))
    source = Path(evenstep.__file__).parent
    for init in source.rglob("__init__.py"):
        package = ".".join(["evenstep", *init.parent.relative_to(source).parts])
        for name in getattr(importlib.import_module(package), "__all__", []):
            is_module = (source / name).is_dir() or (source / f"{name}.py").is_file()
            if package != "evenstep" or not is_module:
                assert f"{package}.{name}" in ids
    assert "evenstep.metrics.accuracy" in ids
    assert "evenstep.errors.ContractError" in ids
    assert "evenstep.integrations.lightning.EvenStrategy" in ids


def test_the_site_shows_readme_notebooks_and_programs(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="start.html"' in home
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert (site / "tutorials" / f"{notebook.stem}.html").is_file()
    for diff in (ROOT / "examples" / "strangers").glob("*/even.diff"):
        assert (site / "examples" / "strangers" / f"{diff.parent.name}.html").is_file()
    for kind in (ROOT / "examples" / "kinds").glob("*.py"):
        assert (site / "examples" / "kinds" / f"{kind.stem}.html").is_file()


def test_every_tutorial_shows_what_its_notebook_printed(site):
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        page = (site / "tutorials" / f"{notebook.stem}.html").read_text(encoding="utf-8")
        assert '<pre class="output"><code>' in page
        pictures = notebook.read_text(encoding="utf-8").count('"image/png"')
        assert page.count('src="data:image/png;base64,') == pictures


def commands(command, path):
    """Yield the words of each command line that a command takes, and the command."""
    yield path, command
    for name, inside in getattr(command, "commands", {}).items():
        yield from commands(inside, f"{path} {name}")


def test_the_reference_has_every_command_with_its_options_and_its_example(site):
    page = (site / "reference" / "command_line.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    for path, command in commands(main, "evenstep"):
        _, found, section = text.partition(f"Usage: {path} [OPTIONS]")
        assert found, path
        section = section.partition("Usage: ")[0]
        for flag in [one.opts[0] for one in command.params if isinstance(one, click.Option)]:
            assert flag in section.split(), (path, flag)
        assert getattr(command, "example", "") in section


def test_the_page_of_the_trainer_has_every_example(site):
    page = (site / "reference" / "trainer.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    for name in vars(evenstep.Trainer):
        if not name.startswith("_"):
            documented = inspect.getdoc(getattr(evenstep.Trainer, name))
            example = documented.split("\n\n")[1]
            assert textwrap.dedent(example) in text, name


def test_a_member_that_is_in_no_group_of_the_page_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(HOOKS.parent)
    page = importlib.import_module("trainer_page")
    module = Path(inspect.getsourcefile(evenstep.Trainer))
    assert "## Train\n" in page.trainer_page(module)
    monkeypatch.delitem(page.GROUPS, "Look")
    with pytest.raises(ValueError, match="fingerprint"):
        page.trainer_page(module)


def test_a_notebook_is_shown_with_its_stored_outputs(monkeypatch):
    monkeypatch.syspath_prepend(HOOKS.parent)  # as mkdocs does while it loads a hook
    spec = importlib.util.spec_from_file_location("site_hooks", HOOKS)
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    outputs = [
        {"output_type": "stream", "text": ["1 < 2\n", "done\n"]},
        {"output_type": "display_data", "data": {"image/png": "QUJD\n", "text/plain": "<Figure>"}},
        {"output_type": "execute_result", "data": {"text/plain": ["42"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": outputs},
    ]
    assert hooks.notebook({"cells": cells}) == "\n\n".join(
        [
            "# Title",
            "```python\nprint(1)\n```",
            '<pre class="output"><code>1 &lt; 2\ndone</code></pre>',
            '<img alt="Output of this cell" src="data:image/png;base64,QUJD">',
            '<pre class="output"><code>42</code></pre>',
        ]
    )
