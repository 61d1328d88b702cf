"""`ckptool info` as text: one screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.sections import Section
from ckptool.diagnosis.info import Info, SectionInfo, info
from ckptool.inspection.blockers import summarize_calls
from ckptool.render.table import table_lines
from ckptool.render.text import (
    PLAIN,
    Look,
    command_lines,
    format_size,
    limit_lines,
    resume_title,
    titled_commands,
    wrap_text,
)
from ckptool.render.verdicts import verdict_text
from ckptool.words import clean, counted, listed, shell

if TYPE_CHECKING:
    from ckptool.diagnosis import Diagnosis

_INDENT = 14
"""The width of the names of facts."""
_MOST_LISTED = 8
"""The most blockers that are listed."""
SECTION_HEADINGS = ("section", "kind", "tensors", "parameters", "bytes", "wrappers")
_MACHINES = {"one_gpu": "one GPU", "cpu": "no GPU"}
"""The machines for which an `Info` has commands, each in words."""


def checkpoint_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the screen about a checkpoint."""
    return info_lines(info(checkpoint))


def file_line(described: Checkpoint | Info) -> str:
    """Return `model.pth: torch-zip, 27 tensors, 1.4 KiB, module., cuda:3`."""
    if isinstance(described, Checkpoint):
        file, nbytes = described.path, sum(tensor.nbytes for _, tensor in described.tensors())
    else:
        file, nbytes = described.file, sum(section.nbytes for section in described.sections)
    wrappers = dict.fromkeys(
        prefix for section in described.sections for prefix in _wrapper_prefixes(section)
    )
    devices = described.devices
    tensors = counted(sum(devices.values()), "tensor")
    facts = [described.format, tensors, format_size(nbytes), *wrappers, *devices]
    return f"{clean(file)}: {', '.join(map(clean, facts))}"


def info_lines(info: Info, look: Look = PLAIN) -> Iterator[str]:
    """Yield the format, the sections, the reasons why it does not load, and the commands that help.

    With `look.fmt` the result is the table of sections.
    """
    if look.fmt:
        yield from _section_table(info.sections, look)
        return
    yield from _head_lines(info, look)
    yield ""
    yield from _command_lines(info, look)


def overview_lines(info: Info, diagnosis: Diagnosis, look: Look = PLAIN) -> Iterator[str]:
    """Yield the facts and the sections, the verdict of `doctor` in a line and its first command.

    With `look.fmt`, a table format, it is only the table of sections.
    """
    if look.fmt:
        yield from info_lines(info, look)
        return
    yield from _head_lines(info, look)
    yield ""
    first = f"{'doctor':<{_INDENT}}{verdict_text(diagnosis)}"
    yield from wrap_text(first, look.width, indent=" " * _INDENT)
    if diagnosis.complaints:
        command = diagnosis.first_command or f"ckptool doctor {shell(diagnosis.file)}"
        yield from command_lines(command, look.width)


def _head_lines(info: Info, look: Look) -> Iterator[str]:
    """Yield the name of the file, its facts, and the table of its sections."""
    yield look.bold(clean(info.file))
    if info.would_run:
        yield look.alarm(f"{'would run':<{_INDENT}}{listed(summarize_calls(info.would_run))}")
    yield from _fact_lines(info, look)
    if info.sections:
        yield ""
        yield from _section_table(info.sections, look)


def _fact_lines(info: Info, look: Look) -> Iterator[str]:
    """Yield a line for each fact that the file has."""
    facts = [
        ("format", format_text(info)),
        ("size", size_text(info)),
        ("devices", counts_text(info.devices)),
        ("dtypes", counts_text(info.dtypes)),
        ("ties", listed((" = ".join(names) for names in info.ties), most=3) if info.ties else ""),
        ("weights_only", "yes" if info.weights_only else "no, because of"),
        *(("", clean(text)) for text in limit_lines(info.blockers, _MOST_LISTED)),
        *(("note", clean(note)) for note in info.notes),
    ]
    for name, text in facts:
        if text:
            yield from wrap_text(f"{name:<{_INDENT}}{text}", look.width, indent=" " * _INDENT)


def format_text(info: Info) -> str:
    """Return the format, the writer, and the pickle protocol."""
    parts = [info.format]
    if info.writer:
        parts.append(f"written by {info.writer}")
    if info.torch_version:
        parts.append(f"torch {info.torch_version}")
    if info.protocol is not None:
        parts.append(f"pickle protocol {info.protocol}")
    if info.byteorder != "little":
        parts.append(f"{info.byteorder}-endian")
    return clean(", ".join(parts))


def size_text(info: Info) -> str:
    """Return the bytes on disk and of tensor data, in words."""
    text = f"{format_size(info.size)} on disk, {format_size(info.storage_bytes)} of tensor data"
    if info.reachable_bytes < info.storage_bytes:
        text += f", {format_size(info.reachable_bytes)} used"
    if info.dead_bytes:
        text += f"; {format_size(info.dead_bytes)} dead"
    return text


def counts_text(counts: Mapping[str, int]) -> str:
    """Return `cuda:0 (14), cpu (2)`, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return listed((f"{name} ({number:,})" for name, number in ordered), 10) if counts else "none"


def section_line(section: Section) -> str:
    """Return `optim_dict: optimizer, 12 entries`."""
    return f"{_format_section_name(section)}: {section.kind}, {counted(len(section.node), 'entry')}"


def _format_section_name(section: Section | SectionInfo) -> str:
    """Return the name of a section, or words for the root and for values."""
    return clean(section.name) or ("(other)" if section.kind == "values" else "(the whole file)")


def _wrapper_prefixes(section: Section | SectionInfo) -> list[str]:
    return [f"{wrapper}." for wrapper in section.wrappers]


def section_rows(sections: Iterable[SectionInfo], *, values: bool = False) -> list[list[str]]:
    """Return the cells below `SECTION_HEADINGS`; `values` replaces the kind by the values."""
    return [
        [
            _format_section_name(section),
            clean((values and section.values) or section.kind),
            f"{section.tensors:,}" if section.tensors else "",
            f"{section.parameters:,}" if section.parameters else "",
            format_size(section.nbytes) if section.tensors else "",
            " ".join(_wrapper_prefixes(section)),
        ]
        for section in sections
    ]


def _section_table(sections: Iterable[SectionInfo], look: Look) -> Iterator[str]:
    """Return the lines of the table of sections."""
    rows = section_rows(sections, values=not look.fmt)
    return table_lines(SECTION_HEADINGS, rows, look, right={2, 3, 4}, flexible=(0, 1, 5))


def _command_lines(info: Info, look: Look) -> Iterator[str]:
    """Yield the commands that make the file load, by machine, or the reason that none does.

    One command is shown without machines if it is the same for all. A machine without a command
    loads the file as is. The command that resumes training comes last.
    """
    commands = {name: info.commands[name] for name in _MACHINES if name in info.commands}
    title = "To use the weights" if "resume" in info.commands else "To load it"
    loads = f"{clean(info.reader)} reads it as is" if info.reader else "loads as is"
    if info.part:  # other files have the rest of the model
        yield f"no command makes it load: {clean(info.part)}"
    elif info.alternatives:  # the same on every machine
        if commands:
            yield from titled_commands("To load all of it:", [commands["cpu"]], look)
        several = ", choose one" * (len(info.alternatives) > 1)
        yield from titled_commands(f"To load it{several}:", info.alternatives, look)
    elif info.obstacle:
        yield from wrap_text(f"no command makes it load: {clean(info.obstacle)}", look.width)
    elif not commands:
        yield loads
    elif len(set(commands.values())) == 1 and len(commands) == len(_MACHINES):
        yield from titled_commands(f"{title}:", set(commands.values()), look)
    else:
        yield look.bold(f"{title} on a machine with")
        for machine, words in _MACHINES.items():
            first = f"  {words:<7}  "
            yield from command_lines(commands.get(machine, loads), look.width, first=first)
    if "resume" in info.commands:
        yield from titled_commands(resume_title(info.training), [info.commands["resume"]], look)
