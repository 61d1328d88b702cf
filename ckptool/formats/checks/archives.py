"""A zip's records: what must be computed of them, and what torch does otherwise than it seems."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from ckptool.errors import CheckpointError, UnsupportedFormat
from ckptool.files import ByteRange
from ckptool.formats.base import Archive, Probe, Record
from ckptool.formats.checks.zip_headers import header_problems
from ckptool.formats.problems import Checksum, Findings, Problem
from ckptool.formats.torch_offsets import Laid, alignment_of, computed_offsets
from ckptool.formats.torch_zip import PICKLE, Contents, is_known_version
from ckptool.words import counted, listed

__all__ = ["archive_findings", "torch_zip_findings"]


def archive_findings(probe: Probe) -> Findings:
    """What can be said of a zip before it is known what it holds; nothing of a folder.

    What the reader refuses is told by opening the file.
    """
    if probe.source is None:
        return Findings()
    whole = ByteRange(probe.source, 0, probe.source.size)
    try:
        archive = probe.archive
    except UnsupportedFormat:
        return Findings(header_problems(whole, refused=True))
    except CheckpointError:
        return Findings()
    if archive is None:
        return Findings()
    stated = [record for record in archive.records.values() if record.crc32 is not None]
    foreign = tuple(Problem("foreign", "", text) for text in archive.notes)
    return Findings(
        (*header_problems(whole), *foreign),
        tuple(_notes(archive, len(archive.records) - len(stated))),
        tuple(_checksum(archive, record) for record in stated),
        len(archive.records),
    )


def _checksum(archive: Archive, record: Record) -> Checksum:
    return Checksum(_place(archive, record.name), record.data, record.crc32 or 0)


def _place(archive: Archive, name: str) -> str:
    """A record's name as the archive has it."""
    return f"{archive.folder}/{name}" if archive.folder else name


def _notes(archive: Archive, unstated: int) -> Iterator[str]:
    if unstated:
        yield (
            f"no CRC-32 was computed of {counted(unstated, 'record')} when the file was written: "
            "nothing tells whether their bytes are right"
        )
    if archive.dead_bytes:
        yield (
            f"{counted(archive.dead_bytes, 'byte')} between the records belong to none, as an edit "
            "in place leaves them"
        )


def torch_zip_findings(archive: Archive, contents: Contents, *, unzipped: bool) -> Findings:
    """What torch refuses, or reads otherwise, of a zip that reads well; less of an unzipped one."""
    problems = [*_behind_pickle(archive, contents)]
    if not unzipped:
        problems += _refused(archive, contents)
        problems += _compressed(contents)
        problems += _misplaced(archive, contents)
    return Findings(tuple(problems))


def _behind_pickle(archive: Archive, contents: Contents) -> Iterator[Problem]:
    """Bytes of the record of the pickle that are behind its STOP."""
    record = contents.storages.find(PICKLE)
    rest = 0 if record is None else record.data.length - contents.unpickled.end
    if record is not None and rest:
        text = f"{counted(rest, 'byte')} behind the end of its pickle are not read"
        yield Problem("trailing", _place(archive, record.name), text)


def _refused(archive: Archive, contents: Contents) -> Iterator[Problem]:
    if not archive.folder:
        yield Problem("folder", "", "its records do not stand in a folder: torch refuses it")
    version = contents.facts.get("version")
    if version is None and contents.storages.find(".data/version") is None:
        yield Problem("version", "", "it has no record 'version': torch refuses it")
    elif version is not None and not is_known_version(version):
        text = f"its version is {version!r}, not between 1 and 10: torch refuses it"
        yield Problem("version", _place(archive, "version"), text)


def _compressed(contents: Contents) -> Iterator[Problem]:
    keys = [key for key, storage in contents.storages.by_key.items() if storage.compressed]
    if keys:
        yield Problem(
            "compressed",
            "",
            f"{counted(len(keys), 'storage')} compressed ({listed(keys, 3)}): mapped with "
            "torch.load(mmap=True) they are garbage; any rewrite stores them plainly",
        )


def _misplaced(archive: Archive, contents: Contents) -> Iterator[Problem]:
    """Where `.format_version` makes torch compute offsets that are not those of the records."""
    if contents.facts.get(".format_version", "") < "1":
        return
    alignment = alignment_of(contents.facts.get(".storage_alignment"))
    if alignment is None:
        yield Problem(
            "offsets",
            _place(archive, ".storage_alignment"),
            "it should state an alignment as a number, from which torch computes where storages "
            "begin",
        )
        return
    used = list(_laid(archive, contents))
    wrong = [
        laid
        for laid, computed in zip_longest(used, computed_offsets(used, alignment))
        if computed != laid.payload
    ]
    if wrong:
        yield Problem(
            "offsets",
            wrong[0].name.decode("utf-8", "replace"),
            "the record .format_version has torch compute where storages begin, and "
            f"{len(wrong):,} of {counted(len(used), 'storage')} begin elsewhere: "
            "torch.load(map_location='meta') and readers that compute offsets get wrong ones; "
            "any rewrite mends it",
        )


def _laid(archive: Archive, contents: Contents) -> Iterator[Laid]:
    """The records of the storages, in the order in which the pickle first uses them."""
    for key, storage in contents.storages.by_key.items():
        record = contents.storages.find(f"data/{key}")
        if storage.data is not None and record is not None and not record.compressed:
            name = _place(archive, record.name).encode("utf-8", "replace")
            yield Laid(name, record.data.length, record.header_offset, record.data.offset)
