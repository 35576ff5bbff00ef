"""Pages of the documentation site that are made from files outside docs/, and from the commands.

README, CHANGELOG and CONTRIBUTING become pages as they are, notebooks pages with their stored
outputs, each example program a page with its code, and each package one with the docstrings of what
it exports. Links in all of them are written for the repository; here they are pointed at the site's
pages.
"""

from __future__ import annotations

import ast
import html
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from command_page import command_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from trainer_page import trainer_page

from evenstep.cli.app import COMMANDS, main

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "evenstep"
COPIED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
SHOWN = ("data", "callbacks", "metrics", "models", "errors", "integrations")  # a page in the menu
BOOSTS = {
    "start|everyday|compare|debugging": 2.0,
    "reference/d2l|mxnet|tutorials/7": 0.1,
    "changelog|contributing|architecture|public_scripts|kinds": 0.1,
    "benchmarks|book|reliability": 0.3,
    "reference/command_line": 0.2,
    "reference/|tutorials/": 0.5,
    "examples/": 0.05,
}
"""What hits on pages weigh in the search, by the beginnings of their addresses; 1 for others. The
first that fits counts."""
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
ATTRIBUTE = re.compile(r'(?P<name>src|srcset|href)="(?P<path>[^"#:]+)(?P<anchor>#[^"]*)?"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from files outside docs/."""
    pages = {**copied(), **tutorials(), **examples(), **reference(), **command_line()}
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page at pages of the site, and choose its place in the search."""
    page.meta |= {"search": search_of(page.file.src_uri)}
    return linked(markdown, page.file.src_uri)


def search_of(uri: str) -> dict[str, Any]:
    """Return whether a page is searched, and what its hits weigh: those for users come first."""
    if uri.startswith("reference/inside/"):
        return {"exclude": True}
    return {"boost": next((weight for start, weight in BOOSTS.items() if re.match(start, uri)), 1)}


def copied() -> dict[str, str]:
    """Return the pages that are files of the repository's root."""
    return {uri: (ROOT / name).read_text(encoding="utf-8") for name, uri in COPIED.items()}


# Notebooks


def tutorials() -> dict[str, str]:
    """Return a page for each notebook."""
    return {
        f"tutorials/{path.stem}.md": notebook(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    }


def notebook(content: Mapping[str, Any]) -> str:
    """Return the cells of a notebook and their stored outputs as Markdown."""
    parts: list[str] = []
    for cell in content["cells"]:
        source = "".join(cell["source"])
        parts.append(fenced(source, "python") if cell["cell_type"] == "code" else source)
        parts += [shown(output) for output in cell.get("outputs", [])]
    return "\n\n".join(part for part in parts if part)


def shown(output: Mapping[str, Any]) -> str:
    """Return one stored output of a cell: a picture, a table, or its text."""
    data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
    if "image/png" in data:
        picture = data["image/png"].replace("\n", "")
        return f'<img alt="Output of this cell" src="data:image/png;base64,{picture}">'
    if "image/svg+xml" in data:
        return f"<div>{data['image/svg+xml']}</div>"
    text = data.get("text/plain", "".join(output.get("text", [])))
    if not text.strip():
        return ""
    return f'<pre class="output"><code>{html.escape(text.rstrip())}</code></pre>'


# Examples


def examples() -> dict[str, str]:
    """Return a page for each example program, and for each program with its diff."""
    folder = ROOT / "examples"
    pages = {f"examples/{path.stem}.md": program(path) for path in sorted(folder.glob("*.py"))}
    rows = [f"* [{Path(uri).stem}]({Path(uri).name})" for uri in pages]
    for path in sorted((folder / "kinds").glob("*.py")):
        pages[f"examples/kinds/{path.stem}.md"] = program(path)
    strangers = (folder / "strangers" / "README.md").read_text(encoding="utf-8")
    pages["examples/strangers/programs.md"] = strangers
    for path in sorted(folder.glob("strangers/*/even.diff")):
        pages[f"examples/strangers/{path.parent.name}.md"] = changed_program(path)
    more = ["* [Programs like public ones](strangers/programs.md)"]
    more += ["* [Kinds of training](../kinds.md)"]
    return {**pages, "examples/index.md": "\n".join(["# Example programs", "", *rows, *more])}


def program(path: Path) -> str:
    """Return the page of an example program."""
    return f"# {path.name}\n\n" + fenced(path.read_text(encoding="utf-8"), "python")


def changed_program(diff: Path) -> str:
    """Return the page of a program and of the diff that makes an evenstep program of it."""
    plain = fenced((diff.parent / "plain.py").read_text(encoding="utf-8"), "python")
    change = fenced(diff.read_text(encoding="utf-8"), "diff")
    return f"# {diff.parent.name}\n\n## The change\n\n{change}\n\n## The program\n\n{plain}"


# Reference


def reference() -> dict[str, str]:
    """Return the pages of all public names, and their index."""
    packages = dict(exporting())
    top = [name for name in packages.pop("evenstep") if name not in ("Trainer", *SHOWN)]
    public = {
        "evenstep": names_of("evenstep", top),
        "evenstep.Trainer": trainer_page(SOURCE / "training" / "trainer.py"),
        **{
            f"evenstep.{one}": names_of(f"evenstep.{one}", packages.pop(f"evenstep.{one}", []))
            for one in SHOWN
        },
        "evenstep.d2l": whole_module("evenstep.book.d2l"),
    }
    inside = {package: names_of(package, names) for package, names in packages.items()}
    pages = {f"reference/{short(name)}.md": f"# {name}\n\n{text}" for name, text in public.items()}
    pages |= {
        f"reference/inside/{short(name)}.md": f"# {name}\n\n{text}" for name, text in inside.items()
    }
    return {**pages, "reference/index.md": contents(public, inside)}


def command_line() -> dict[str, str]:
    """Return the page of the command line."""
    return {"reference/command_line.md": command_page(main, COMMANDS)}


def short(name: str) -> str:
    """Return the name of a page's file."""
    return name.removeprefix("evenstep.").lower()


def exporting() -> Iterator[tuple[str, list[str]]]:
    """Yield the packages that export names, with these names."""
    for path in sorted(SOURCE.rglob("__init__.py")):
        names = exported(ast.parse(path.read_text(encoding="utf-8")))
        if names:
            yield ".".join(["evenstep", *path.parent.relative_to(SOURCE).parts]), names


def exported(tree: ast.Module) -> list[str]:
    """Return the value of `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def names_of(package: str, names: list[str]) -> str:
    """Return the docstrings of what a package exports, or of all that a module defines."""
    if package == "evenstep.integrations":
        names = ["transformers.EvenTrainer", "lightning.EvenStrategy"]
    if not names:
        return whole_module(package)
    return "\n\n".join([purpose(package), *(f"::: {package}.{name}" for name in names)])


def whole_module(name: str) -> str:
    """Return the docstrings of a module and of what is public in it."""
    return f"::: {name}\n    options: {{show_root_heading: false, show_root_toc_entry: false}}"


def purpose(name: str) -> str:
    """Return the docstring of a package or a module; nothing for other names."""
    place = SOURCE.joinpath(*name.split(".")[1:])
    for path in (place / "__init__.py", place.with_suffix(".py")):
        if path.is_file():
            return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return ""


def contents(public: Iterable[str], inside: Iterable[str]) -> str:
    """Return the index of the reference."""
    return "\n".join(
        [
            "# Reference",
            "",
            "Every public name, from its docstring: arguments with their shapes and units, results,"
            " and the errors that are raised.",
            "",
            *(row(name, f"{short(name)}.md") for name in public),
            "",
            "## Inside",
            "",
            "What the packages offer to each other. It may change in any version. "
            "[How evenstep is built](../architecture.md) says what each is for.",
            "",
            *(row(name, f"inside/{short(name)}.md") for name in inside),
        ]
    )


def row(name: str, page: str) -> str:
    """Return a line of the index: the link, and the first line of the docstring."""
    first = purpose(name).partition("\n")[0]
    return f"* [{name}]({page})" + (f": {first}" if first else "")


# Links


def linked(markdown: str, uri: str) -> str:
    """Point links outside code blocks at pages of the site; those to other files become text."""
    parts = FENCED.split(markdown)
    for i in range(0, len(parts), 2):
        parts[i] = LINK.sub(lambda link: new_link(link, uri), parts[i])
        parts[i] = ATTRIBUTE.sub(lambda attribute: new_attribute(attribute, uri), parts[i])
    return "".join(parts)


def new_link(link: re.Match[str], uri: str) -> str:
    """Return a Markdown link for the site."""
    place = in_the_site(link["path"], uri)
    if place is None:
        return link["text"]
    return f"{link['mark']}[{link['text']}]({place}{link['anchor'] or ''})"


def new_attribute(attribute: re.Match[str], uri: str) -> str:
    """Return an attribute of HTML for the site."""
    place = in_the_site(attribute["path"], uri)
    page = (place or "").removesuffix(".md") + ".html" if (place or "").endswith(".md") else place
    return f'{attribute["name"]}="{page or ""}{attribute["anchor"] or ""}"'


def in_the_site(path: str, uri: str) -> str | None:
    """Return where a link of the page `uri` leads to in the site; None if nowhere.

    A link that leads to no file stays as it is: the strict build refuses it.
    """
    file = posixpath.normpath(posixpath.join(posixpath.dirname(written_in(uri)), path))
    target = page_of(file)
    if target is None:
        return None if (ROOT / file).exists() else path
    return posixpath.relpath(target, posixpath.dirname(uri) or ".")


def written_in(uri: str) -> str:
    """Return the file of the repository that a page was made from."""
    for name, page in COPIED.items():
        if page == uri:
            return name
    if uri == "examples/strangers/programs.md":
        return "examples/strangers/README.md"
    if uri.startswith("tutorials/"):
        return "notebooks/" + uri.removeprefix("tutorials/")
    return f"docs/{uri}"


def page_of(file: str) -> str | None:
    """Return the page (or the picture) of the site that shows a file or a folder."""
    if file in COPIED:
        return COPIED[file]
    if file == "notebooks":
        return "tutorials/1_hybridize.md"
    if file == "examples":
        return "examples/index.md"
    if file in ("examples/strangers", "examples/strangers/README.md"):
        return "examples/strangers/programs.md"
    if file == "examples/kinds":
        return "kinds.md"
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file.startswith("notebooks/"):
        return f"tutorials/{Path(file).stem}.md"
    is_program = re.fullmatch(r"examples/(strangers/|kinds/)?\w+(\.py)?", file)
    return file.removesuffix(".py") + ".md" if is_program and (ROOT / file).exists() else None


def fenced(code: str, language: str) -> str:
    """Return code as a block of Markdown."""
    return f"```{language}\n{code.rstrip()}\n```"
