"""Text where a checkpoint should be: pointers, pages, error answers, indexes, notes."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable
from html import unescape
from typing import Any

from ckptool.errors import UnsupportedFormat
from ckptool.formats.base import Probe
from ckptool.formats.identify_kinds import Finding, few, quoted, shell, size_in_words

__all__ = ["find"]

_LOOKED_AT = 64 << 10
_MOST_JSON = 32 << 20
_AGAIN = "download it again, by the link of the file itself, and look at its size"


def find(probe: Probe) -> Finding | None:
    """What the text is; None if it is no text."""
    text = _text_of(probe)
    if text is None:
        return None
    for pattern, say in _KINDS:
        found = pattern.match(text)
        if found:
            return say(probe, text)
    return _plain(probe, text)


def _text_of(probe: Probe) -> str | None:
    if probe.source is None:
        return None
    raw = probe.source.read(0, min(probe.source.size, _LOOKED_AT))
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = raw.decode("utf-16", "replace")
    else:
        text = raw.decode("utf-8-sig", "replace")
    strange = sum(1 for char in text if char == "\ufffd" or (char < " " and char not in _WHITE))
    is_page = re.match(r"\s*<[!?\w]", text) is not None  # in whatever encoding
    return text.lstrip() if strange * 20 <= len(text) or is_page else None


_TITLE = re.compile(r"<title[^>]{0,100}>(.{0,400}?)</title", re.IGNORECASE | re.DOTALL)
_WHITE = "\t\n\r\f\b\x1b"


def _pattern(name: str) -> str:
    """A name as `--include` takes it: a list with commas, of patterns."""
    return re.sub(r"[*\[\]\\,]", "?", name)


def _git_lfs(probe: Probe, text: str) -> Finding:
    size = re.search(r"^size (\d{1,18})$", text, re.MULTILINE)
    real = f" (the real one has {size_in_words(int(size[1]))})" if size else ""
    folder, name = os.path.split(os.path.abspath(probe.path))
    return Finding(
        f"a git-lfs pointer, not the file itself{real}",
        f"git lfs install && git -C {shell(folder)} lfs pull "
        f"--include {shell('**/' + _pattern(name))}",
    )


def _dvc(probe: Probe, text: str) -> Finding:
    return Finding("a DVC pointer, not the file itself", f"dvc pull {shell(probe.path)}")


def _page(probe: Probe, text: str) -> Finding:
    """An HTML page; of Google Drive's it is known what they want."""
    found = _TITLE.search(text)
    title = " ".join(unescape(found[1]).split()) if found else ""
    named = f" ({quoted(title)})" if title else ""
    if "Quota exceeded" in text or "quota" in title.lower():
        return Finding(
            "an HTML page: Google Drive's, saying that too many have downloaded the file"
            if "drive" in text.lower()
            else f"an HTML page{named}: the server's limit on downloads",
            "try again tomorrow, or copy the file to a Drive of your own and download that",
        )
    if "drive.google.com" in text or "Google Drive" in title:
        return Finding(
            f"an HTML page of Google Drive{named}, not the file itself",
            "download it with gdown, or in a browser by `Download anyway`",
        )
    return Finding(f"an HTML page{named}, not the file itself", _AGAIN)


def _xml(probe: Probe, text: str) -> Finding:
    if re.search(r"<html|<!doctype html", text[:2000], re.IGNORECASE):
        return _page(probe, text)
    answer = re.search(r"<(?:Code|Message)>([^<]*)</", text)
    if answer:
        return Finding(f"a server's error answer: {quoted(answer[1])}", _AGAIN)
    return Finding("an XML document", "give the checkpoint itself")


def _json(probe: Probe, text: str) -> Finding:
    if probe.source is None or probe.source.size > _MOST_JSON:
        return Finding("a text that begins like JSON", "give the checkpoint itself")
    try:
        found = json.loads(probe.source.read(0, probe.source.size))
    except (ValueError, RecursionError):
        return Finding(
            "a text that begins like JSON and is none", f"look at it: head {shell(probe.path)}"
        )
    if not isinstance(found, dict):
        return Finding("a JSON document", "give the checkpoint itself")
    return _json_object(probe, found)


def _json_object(probe: Probe, found: dict[str, Any]) -> Finding:
    if "weight_map" in found:  # as an index it would have been read
        return Finding("an index of shards, where a shard should be", "give the index itself")
    for key in ("error", "message", "detail"):
        if isinstance(found.get(key), (str, dict)):
            answer = found[key] if isinstance(found[key], str) else json.dumps(found[key])
            return Finding(f"a server's error answer: {quoted(answer, 200)}", _AGAIN)
    if found.keys() & {"architectures", "model_type", "hidden_size", "_class_name"}:
        return Finding(
            "a model's configuration (JSON), not its weights",
            "give the file with the weights: model.safetensors or pytorch_model.bin",
        )
    return Finding(
        f"a JSON document with the keys {few(list(found))}", "give the checkpoint itself"
    )


def _tensorflow(probe: Probe, text: str) -> Finding:
    return Finding(
        "the note of a TensorFlow checkpoint on which of its files is the latest",
        f"TensorFlow reads it: tf.train.latest_checkpoint({os.path.dirname(probe.path) or '.'!r})",
        UnsupportedFormat,
    )


def _tag(probe: Probe, text: str) -> Finding:
    return Finding(
        f"the note of a DeepSpeed or Megatron checkpoint that the latest is {quoted(text.strip())}",
        f"give the folder: ckptool list {shell(os.path.dirname(probe.path) or '.')}",
        UnsupportedFormat,
    )


def _python(probe: Probe, text: str) -> Finding:
    return Finding("a Python script", "run it for the checkpoint that it makes, and give that")


def _plain(probe: Probe, text: str) -> Finding:
    if not text:
        return Finding("a text of white space alone", _AGAIN)
    first = text.splitlines()[0].strip()
    return Finding(
        f"a text that begins with {quoted(first)}",
        "if it was downloaded this is the server's answer: download it again",
    )


_KINDS: tuple[tuple[re.Pattern[str], Callable[[Probe, str], Finding]], ...] = (
    (re.compile(r"version https?://(?:git-lfs\.github|hawser\.github)\.com/spec/"), _git_lfs),
    (re.compile(r"(?:#.*\n)*(?:outs|md5):.*\n(?s:.*)path:"), _dvc),
    (re.compile(r"<(?:!doctype html|html|head|body|title)\b", re.IGNORECASE), _page),
    (re.compile(r"<[!?\w]"), _xml),
    (re.compile(r"[\[{]"), _json),
    (re.compile(r"model_checkpoint_path: "), _tensorflow),
    (re.compile(r"(?:global_step|iter_)?\d+\s*\Z"), _tag),
    (re.compile(r"(?:#!.*python|\"\"\"|(?:import|from) \w+)"), _python),
)
