"""Questions and answers in the chat format's sense: what documentation and code already say, asked for.

A docstring answers "What does X do?", a function's source answers "Write a function that …", a glossary entry answers "What is
a …?", and Python's own FAQ is questions and answers as it stands.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from training.smalltalk import SMALLTALK
from training.sources import DIRECTIVE, Text, is_held_out, plain

LONGEST_ANSWER = 900  # characters
SHORTEST_ANSWER = 30
LONGEST_CODE = 1000

EXPLAIN = (
    "What does `{name}` do?", "What does {name} do?", "Explain `{name}`.", "What is {name}?", "What is `{name}` for?",
    "Tell me about {name}.", "Describe {name}.", "How do I use {name}?", "Can you explain {name} to me?", "{name}?",
)  # fmt: skip
MODULES = ("What is the {name} module for?", "What does the `{name}` module do?", "Tell me about the {name} module.",
           "Explain the module `{name}`.")  # fmt: skip
ARGUMENTS = ("What are the arguments of {name}?", "How is `{name}` called?", "Show me the signature of {name}.")
TERMS = ("What is {article} {name}?", "What does {name} mean?", "Explain the term {name}.", "Define {name}.")
WRITE = (
    "Write a function `{name}`: {purpose}", "Write a Python function that does this: {purpose}", "Show me the code of {name}.",
    "Implement `{signature}`. {purpose}",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer."""

    question: str
    answer: str
    held_out: bool  # its subject is, and nothing about it is trained on
    spare: bool = False  # a wording that is never trained on, of a subject that may be
    module: str = ""


def exchanges(code: list[Text], pages: list[tuple[Text, str]]) -> Iterator[Exchange]:
    """All of them, in a fixed order; a question comes in several wordings."""
    for text in code:
        yield from (replace(exchange, module=text.subject) for exchange in _from_code(text))
    for page, rst in pages:
        if page.subject == "glossary":
            yield from (replace(exchange, module="glossary") for exchange in _glossary(rst))
        elif page.subject.startswith("faq."):
            yield from (replace(exchange, module="faq") for exchange in _faq(page))
        elif page.subject.startswith("library."):
            yield from _from_page(rst)
    for questions, answer in SMALLTALK:
        for question in questions:
            yield Exchange(question, answer, False, module="smalltalk")


def _from_code(text: Text) -> Iterator[Exchange]:
    tree, lines = ast.parse(text.text), text.text.splitlines()
    yield from _ask(MODULES, ast.get_docstring(tree), text.held_out, name=text.subject)
    yield from _definitions(tree, text.subject, lines, text.held_out)


def _definitions(node: ast.AST, outer: str, lines: list[str], held_out: bool) -> Iterator[Exchange]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or child.name.startswith("_"):
            continue
        name, doc = f"{outer}.{child.name}", ast.get_docstring(child)
        short = ".".join(name.split(".")[-2:])
        if doc and not doc.startswith("Test"):
            yield from _ask(EXPLAIN[_pick(name, 2) :: 2], doc, held_out, name=short)
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, name, lines, held_out)
            continue
        signature = f"{child.name}({ast.unparse(child.args)})"
        if doc:
            yield from _ask((ARGUMENTS[_pick(name, 3)],), doc, held_out, lead=f"`{signature}`\n\n", name=short)
        source = textwrap.dedent("\n".join(lines[child.lineno - 1 : child.end_lineno]))
        if doc and len(source) <= LONGEST_CODE and source.count("\n") >= 3:
            purpose = _first_sentence(doc)
            answer = f"```python\n{source}\n```"
            for template in WRITE[_pick(name, 2) :: 2]:
                yield Exchange(template.format(name=child.name, purpose=purpose, signature=signature), answer, held_out)


def _from_page(rst: str) -> Iterator[Exchange]:
    """The descriptions below `.. function::` and its like; nested ones are methods of what is above them."""
    lines = rst.splitlines()
    module, owners = "", [(-1, "")]
    for number, line in enumerate(lines):
        directive = DIRECTIVE.match(line)
        if not directive:
            continue
        margin, kind, rest = directive.groups()
        indent = len(margin)
        if kind in ("module", "currentmodule"):
            module = rest.strip()
            if kind == "module":
                introduction = plain("\n".join(_until_directive(lines[number + 1 :], -1))).replace(
                    "**Source code:**", "Source:"
                )
                yield from _ask(MODULES, re.sub(r"^Source:.*\n", "", introduction).strip(), is_held_out(module), name=module)
            continue
        if kind.removeprefix("c:") not in _DESCRIBED:
            continue
        while owners[-1][0] >= indent:
            owners.pop()
        signature = _join_signature(rest, lines[number + 1 :])
        bare = re.split(r"[(\s]", signature, maxsplit=1)[0] if not kind.startswith("c:") else _c_name(signature)
        prefix = owners[-1][1] or module
        name = bare if "." in bare or not prefix or kind.startswith("c:") else f"{prefix}.{bare}"
        owners.append((indent, name))
        body = plain(inspect.cleandoc("\n".join(_until_directive(lines[number + 1 :], indent))))
        held_out = is_held_out(module) if module else False
        about = [*_ask(EXPLAIN[_pick(name, 2) :: 2], body, held_out, name=name)]
        about += [replace(e, spare=True) for e in _ask(EXPLAIN[1 - _pick(name, 2) :: 2], body, held_out, name=name)]
        if "(" in signature:
            about += _ask((ARGUMENTS[_pick(name, 3)],), body, held_out, lead=f"`{signature}`\n\n", name=name)
        yield from (replace(exchange, module=module or "builtins") for exchange in about)


_DESCRIBED = {"function", "class", "method", "classmethod", "staticmethod", "attribute", "data", "exception", "decorator",
              "coroutinefunction", "coroutinemethod", "macro", "type", "var"}  # fmt: skip


def _join_signature(first: str, following: list[str]) -> str:
    parts = [first]
    for line in following:
        if not parts[-1].endswith("\\"):
            break
        parts[-1] = parts[-1].rstrip("\\ ")
        parts.append(line.strip())
    return " ".join(parts)


def _c_name(signature: str) -> str:
    match = re.search(r"(\w+)\s*(\(|$)", signature)
    return match.group(1) if match else signature


def _until_directive(lines: list[str], indent: int) -> Iterator[str]:
    """The body below a directive at `indent`, up to the next description or the body's end."""
    for number, line in enumerate(lines):
        directive = DIRECTIVE.match(line)
        if directive and directive.group(2).removeprefix("c:") in _DESCRIBED and number:
            return
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            return
        if number or not line.endswith("\\"):
            yield line


def _glossary(rst: str) -> Iterator[Exchange]:
    entries = re.split(r"\n   (?=\S)", rst.partition(".. glossary::")[2])
    for entry in entries:
        term, _, body = entry.partition("\n")
        term = term.strip().strip("`")
        article = "an" if term[:1] in "aeiou" else "a"
        yield from _ask(TERMS, plain(inspect.cleandoc(body)), is_held_out(term), name=term, article=article)


def _faq(page: Text) -> Iterator[Exchange]:
    for section in re.split(r"^# ", page.text, flags=re.MULTILINE)[1:]:
        question, _, body = section.partition("\n")
        if question.endswith("?"):
            yield from _ask((question,), body, is_held_out(question))
            yield from _ask((question,), body, is_held_out(question))


def _ask(questions: tuple[str, ...], text: str | None, held_out: bool, lead: str = "", **names: str) -> Iterator[Exchange]:
    answer = _answer(text or "")
    if len(answer) < SHORTEST_ANSWER:
        return
    for question in questions:
        yield Exchange(question.format(**names) if names else question, lead + answer, held_out)


def _answer(text: str) -> str:
    """Whole paragraphs from the beginning, lines joined, up to LONGEST_ANSWER characters."""
    taken: list[str] = []
    length = 0
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if re.match(
            r"\s*(:param|\S+\n\s*-{3,}|Parameters\b|Returns\b|Examples?\b|Args:|See [Aa]lso|References|\.\. |New in version)",
            paragraph,
        ):
            break
        literal = paragraph.startswith((" ", ">>>")) or re.match(r"\s*([*#-]|\d+\.) ", paragraph) is not None
        flowing = paragraph.rstrip() if literal else " ".join(paragraph.split())
        if length + len(flowing) > LONGEST_ANSWER:
            break
        taken.append(flowing)
        length += len(flowing)
    while taken and taken[-1].endswith(":"):
        taken.pop()
    return "\n\n".join(taken)


def _first_sentence(doc: str) -> str:
    first = " ".join(doc.strip().split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".") + "."


def _pick(name: str, count: int) -> int:
    return sum(name.encode()) % count
