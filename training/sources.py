"""Where the training text comes from: Python code as it is installed here, and Python's documentation in reStructuredText.

Everything is read from this machine and nothing is fetched, so the same installation gives the same text. `SOURCES` names
each origin with its licence; the model card repeats them.
"""

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

DOCS = Path("/usr/share/doc/python3.11/html/_sources")  # Debian's package python3.11-doc
HELD_OUT = 40  # one module in so many is never trained on
SALT = 8  # which byte of the hash decides: this one holds out enum, mailbox and numbers rather than what everyone asks about
SKIPPED_PARTS = {"test", "tests", "testing", "__pycache__", "site-packages", "_vendor", "idlelib", "lib2to3", "encodings",
                 "pydoc_data", "ensurepip", "distutils", "turtledemo", "msilib", "lib-dynload"}  # fmt: skip
SKIPPED_PAGES = {"whatsnew/changelog", "contents", "license", "library/2to3", "copyright", "bugs", "about"}


@dataclass(frozen=True, slots=True)
class Source:
    """One origin of text."""

    name: str
    licence: str
    root: Path

    @property
    def version(self) -> str:
        return "3.11" if self.name.startswith("cpython") else version(self.name)


@dataclass(frozen=True, slots=True)
class Text:
    """One file. `subject` is the module it is about: code and documentation of one module are held out together."""

    source: str
    subject: str
    text: str

    @property
    def held_out(self) -> bool:
        return is_held_out(self.subject)


def _sources() -> tuple[Source, ...]:
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    licences = {
        "click": "BSD-3-Clause", "jinja2": "BSD-3-Clause",
        "starlette": "BSD-3-Clause", "httpx": "BSD-3-Clause", "rich": "MIT", "structlog": "MIT OR Apache-2.0",
    }  # fmt: skip
    return (
        Source("cpython-library", "PSF-2.0", library),
        Source("cpython-documentation", "PSF-2.0 (examples also 0BSD)", DOCS),
        *(Source(name, licence, packages / name) for name, licence in licences.items()),
    )


SOURCES = _sources()


def is_held_out(subject: str) -> bool:
    """By the module's own name, whatever package or page it is in."""
    return hashlib.sha256(subject.rpartition(".")[2].encode()).digest()[SALT] % HELD_OUT == 0


def read_code() -> Iterator[Text]:
    """Python files of all sources, in a fixed order; generated tables are left out."""
    for source in SOURCES:
        if source.name == "cpython-documentation":
            continue
        for path in sorted(source.root.rglob("*.py")):
            parts = path.relative_to(source.root).with_suffix("").parts
            if SKIPPED_PARTS & set(parts) or any("test" in part for part in parts):
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) < 200 or not _is_prose_like(text):
                continue
            package = () if source.name == "cpython-library" else (source.name,)
            subject = ".".join((*package, *(part for part in parts if part != "__init__")))
            yield Text(source.name, subject or source.name, text.expandtabs(8))


def read_pages() -> Iterator[tuple[Text, str]]:
    """Pages of the documentation with markup removed, each with its reStructuredText."""
    for path in sorted(DOCS.rglob("*.rst.txt")):
        page = str(path.relative_to(DOCS)).removesuffix(".rst.txt")
        if page in SKIPPED_PAGES or page.startswith("distutils/"):
            continue
        rst = path.read_text(encoding="utf-8")
        yield Text("cpython-documentation", page.replace("/", "."), plain(rst)), rst


def _is_prose_like(text: str) -> bool:
    """Neither a table of numbers nor a generated file."""
    letters = sum(character.isalpha() or character == " " for character in text)
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return letters > 0.6 * len(text)


ROLE_WITH_TARGET = re.compile(r":[\w:+-]+:`([^`<]+?)\s*<[^`>]+>`")
ROLE = re.compile(r":(\w[\w:+-]*):`([^`]+)`")
LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{1,2}")
LITERAL = re.compile(r"``(.+?)``", re.DOTALL)
EMPHASIS = re.compile(r"(?<![\w*`])\*([^*\s`](?:[^*`\n]*[^*\s`])?)\*(?![\w*])")
DIRECTIVE = re.compile(r"^( *)\.\. ([\w:-]+)::[ ]?(.*)$")
HEADING = re.compile(r"^(\S.*)\n([-=~^*+\"'#.])\2{3,}\n", re.MULTILINE)
OPTION = re.compile(r"^\s+:[\w-]+:( .*)?$")
VERSION = {"versionadded": "New in version", "versionchanged": "Changed in version", "deprecated": "Deprecated since version",
           "deprecated-removed": "Deprecated since version"}  # fmt: skip
ADMONITIONS = {"note": "Note:", "warning": "Warning:", "seealso": "See also:", "tip": "Tip:", "impl-detail": "CPython detail:"}
SIGNATURES = {"function", "class", "method", "classmethod", "staticmethod", "attribute", "data", "exception", "decorator",
              "coroutinefunction", "coroutinemethod", "c:function", "c:type", "c:macro", "c:var", "describe", "opcode",
              "module", "option", "cmdoption", "envvar", "token", "abstractmethod", "awaitablefunction"}  # fmt: skip
PLAIN_ROLES = {
    "term",
    "ref",
    "doc",
    "abbr",
    "dfn",
    "menuselection",
    "guilabel",
    "numref",
    "pep",
    "rfc",
    "issue",
    "source",
    "sup",
}


def inline(text: str) -> str:
    """Roles, links, literals and emphasis to plain text with code in backticks."""

    def role(match: re.Match[str]) -> str:
        kind, target = match.group(1), match.group(2).lstrip("!")
        if target.startswith("~"):
            target = target[1:].rpartition(".")[2]
        if kind == "pep":
            return f"PEP {target}"
        return target if kind in PLAIN_ROLES else f"`{target}`"

    text = ROLE_WITH_TARGET.sub(r"\1", text)
    text = LITERAL.sub(lambda match: "`" + match.group(1) + "`", text)
    text = ROLE.sub(role, text)
    text = LINK.sub(r"\1", text)
    text = EMPHASIS.sub(r"\1", text)
    return re.sub(r"\|(\w+)\|", r"\1", text).replace("\\ ", "").replace("\\*", "*")


def plain(rst: str) -> str:
    """reStructuredText to text a reader would like: signatures and prose stay, machinery goes."""
    lines: list[str] = []
    dropping: int | None = None  # indentation of a directive whose body goes too
    for line in rst.splitlines():
        indent = len(line) - len(line.lstrip())
        if dropping is not None:
            if not line.strip() or indent > dropping:
                continue
            dropping = None
        directive = DIRECTIVE.match(line)
        if directive:
            margin, kind, rest = directive.groups()
            if kind in VERSION:
                lines.append(f"{margin}{VERSION[kind]} {inline(rest).split(' ')[0]}.")
            elif kind in ADMONITIONS:
                lines.append(f"{margin}{ADMONITIONS[kind]} {inline(rest)}".rstrip())
            elif kind in SIGNATURES:
                lines.append(margin + inline(rest).rstrip("\\ "))
            elif kind not in {
                "doctest",
                "code-block",
                "testcode",
                "productionlist",
                "only",
                "rst-class",
                "glossary",
                "highlight",
            }:
                dropping = indent
            continue
        if line.lstrip().startswith((".. ", "..\n")) or OPTION.match(line):
            continue
        lines.append(line.rstrip())
    text = inline("\n".join(lines))
    text = re.sub(r" ?::\n", ":\n", text)
    text = HEADING.sub(r"# \1\n", text)
    text = re.sub(r"^[-=*#~]{4,}\n", "", text, flags=re.MULTILINE)
    text = re.sub(r" *\\\n\s+", " ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
