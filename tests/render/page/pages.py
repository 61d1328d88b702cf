"""A page as its markup has it: elements, scripts, data, text."""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr", "base"}


@dataclass
class Element:
    tag: str
    attributes: dict
    text: str = ""
    inside: list = field(default_factory=list)
    """The tags around it, outermost first."""


class Page(HTMLParser):
    """Parses as it is made; elements that are not closed in their order are an error."""

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.source = content.decode()
        self.elements = []
        self._open = []
        self.feed(self.source)
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs), inside=[one.tag for one in self._open])
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element.text += data

    def all(self, tag, **attributes):
        return [
            one
            for one in self.elements
            if one.tag == tag and attributes.items() <= one.attributes.items()
        ]

    def one(self, tag, **attributes):
        (found,) = self.all(tag, **attributes)
        return found

    @property
    def data(self):
        return json.loads(self.one("script", type="application/json").text)

    @property
    def script(self):
        (found,) = (one for one in self.all("script") if "type" not in one.attributes)
        return found.text

    @property
    def policy(self):
        content = self.one("meta", **{"http-equiv": "Content-Security-Policy"})
        parts = content.attributes["content"].split("; ")
        return dict(part.split(" ", 1) for part in parts)


def digest(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def names(document, columns="tensors", tree=None):
    """The full names that the script makes of a column of labels."""
    tree = tree or document["names"]
    full = [""]
    for label, parent in list(zip(tree["label"], tree["parent"], strict=True))[1:]:
        full.append(full[parent] + label)
    rows = document[columns]
    return [
        full[module] + label for module, label in zip(rows["module"], rows["label"], strict=True)
    ]


ADDRESS = re.compile(r"(?:https?:)?//[\w.-]+\.\w+|url\(|@import", re.IGNORECASE)
"""Something that a browser might fetch."""
