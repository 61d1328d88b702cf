"""No text that a user reads has a phrase that our language guide bans."""

import ast
import re

import pytest

from tests.sources import PROJECT

EVERYWHERE = (
    r"\bbeside (?:it|the|its|them|that|a|an)\b", r"\bas far as\b", r"\banew\b",
    r"\bmend(?:s|ed|ing)?\b", r"\bis wanted\b", r"\bare wanted\b", r"\bits name says\b",
    r"\bstands? (?:at|in|before|after|there|between|behind)\b",
    r"\blies (?:at|in|there|behind|next)\b", r"\bof (?:which|whom) (?:the|some|one|each|those)\b",
    r"\bwhatever\b", r"\bwithout a word\b", r"\bin silence\b", r"\bgoes on\b",
    r"\btells (?:that|a|the|its|how|which|what|of)\b", r"\bis told\b", r"\bof DeepSpeed's\b",
    r"\bof Megatron's\b", r"\bof torch's\b", r"\bhas to say\b",
    r"\bcolour|\bquantis|\brecognis|\bserialis|\bnormalis|\binitialis|\bbehaviour|\bneighbour|\bsummaris",
)  # fmt: skip
"""In any text: see the principles and the glossary of the guide."""
MESSAGES = (
    r"\bthere is (?:nothing|none) (?:named|at|in|on)\b", r"; there is ", r"\bexists already\b",
    r"\bbecomes? (?:cpu|bfloat16)\b", r"\bstays? as (?:it|they)\b",
    r"\bloads as it is\b", r"\bleft as (?:it|they)\b", r"\btold\b", r"\bsays\b", r"\bholds\b",
    r"\bit is no (?!longer|more)\w",
    r"\bmeanwhile\b", r"\bmay be called\b", r"\bcalled so\b", r"\bending of\b",
)  # fmt: skip
"""In errors, hints, notes and receipts."""
PHRASES = {
    "messages": EVERYWHERE + MESSAGES,
    "help": EVERYWHERE,
    "docs": EVERYWHERE,
    "reference": EVERYWHERE,
}
"""By the kind of text, the regular expressions that it does not match."""


def messages():
    """Yield where each string of the package is that has words, and its text."""
    for path in sorted((PROJECT / "ckptool").rglob("*.py")):
        if path.name == "group.py":  # it has the words of users that lead to a command
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and " " in value and id(node) not in documented | bare:
                yield f"{path.relative_to(PROJECT)}:{node.lineno}", value


def prose(pages):
    """Yield the lines of pages outside of blocks and quotes of code."""
    for path in pages:
        in_code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            in_code ^= line.startswith("```")
            if not in_code:
                yield f"{path.relative_to(PROJECT)}:{number}", re.sub(r"`[^`]*`", "`...`", line)


def texts(kind):
    docs = PROJECT / "docs"
    if kind == "messages":
        yield from messages()
    elif kind == "help":
        page = (docs / "cli.md").read_text(encoding="utf-8")
        yield from ((f"docs/cli.md:{n}", line) for n, line in enumerate(page.splitlines(), 1))
    elif kind == "reference":
        yield from prose([docs / "api.md"])
    else:
        made = {docs / "cli.md", docs / "api.md"}
        yield from prose([PROJECT / "README.md", *sorted({*docs.glob("*.md")} - made)])


@pytest.mark.parametrize("kind", PHRASES)
def test_banned_phrases_do_not_occur(kind):
    banned = re.compile("|".join(PHRASES[kind]))
    found = [f"{where}: {hit[0]!r}" for where, text in texts(kind) if (hit := banned.search(text))]
    assert found == []


def test_a_banned_phrase_is_found():
    banned = re.compile("|".join(PHRASES["messages"]))
    assert banned.search("there is nothing named 'x'")
    assert banned.search("copy it anew")
    assert not banned.search("extensions such as .pth")
