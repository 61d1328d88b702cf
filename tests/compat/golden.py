r"""Record what every verb answers and writes for each fixture, or compare two records.

    python -m tests.compat.golden record RECORD.json [FOLDER ...]
    python -m tests.compat.golden compare BEFORE.json AFTER.json

A record holds exit codes, JSON documents and the SHA-256 of written files, and the same of
`load_into` for models that are built from the names and shapes of a file. FOLDERs hold checkpoints,
`fixtures/` by default. To record another commit, copy this file into a worktree of it and run it
there, with PYTHONPATH naming that worktree; the record says which package it is of.

`compare` exits with 1 where an exit code, data of JSON or a SHA-256 differs, or where AFTER lacks a
call; calls that only AFTER has do not count. Changed sentences are listed apart and do not count: a
sentence is text, or a list of texts, under a key of SENTENCES, and text of several words under
`what`, as `doctor` has it. A change that several files have in common is one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

SENTENCES = {
    "err", "helps", "hint", "left_out", "loss", "notes", "problems", "reason", "remarks", "remedy",
    "text", "weights_only_blockers", "why",
}  # fmt: skip
CALLS = {
    "list": "list --hash FILE",
    "list --tree": "list --tree FILE",
    "info": "info FILE",
    "show tensor": "show FILE TENSOR",
    "show value": "show FILE VALUE",
    "stats": "stats FILE",
    "verify": "verify --values FILE",
    "diff itself": "diff FILE FILE",
    "diff next": "diff FILE NEXT",
    "report": "report FILE -o out.html",
    "strip-module": "strip-module FILE -o out.pth",
    "add-module": "add-module FILE -o wrapped.pth",
    "rename": r"rename FILE --rename (^|\.)weight$=>\1kernel -o renamed.pth",
    "remap": "remap FILE --to cpu -o out.pth",
    "cast": "cast FILE --dtype bfloat16 -o out.pth",
    "extract": "extract FILE --model-only -o out.pth",
    "compact": "compact FILE -o out.pth",
    "average": "average FILE FILE -o out.pth",
    "convert": "convert FILE -o out.pth",
    "convert to safetensors": "convert FILE -o out.safetensors",
    "convert --plain": "convert FILE --plain -o out.pth",
    "convert --like wrapped": "convert FILE --like wrapped.pth -o out.pth",
    "convert --like renamed": "convert FILE --like renamed.pth -o out.pth",
    "match itself": "match FILE --like FILE",
    "match wrapped": "match FILE --like wrapped.pth",
    "match renamed": "match FILE --like renamed.pth",
    "doctor": "doctor FILE --quick --devices cpu",
    "doctor --like wrapped": "doctor FILE --quick --devices cpu --like wrapped.pth",
}
"""Command lines, in the order in which they run: two calls write the references of others. NEXT is
the file after FILE in its folder, TENSOR and VALUE are the first ones that `list` names."""

NOT_FIXTURES = (".oracle.json", ".py", ".md", ".json")
LARGEST = 1 << 26
"""Bytes of the largest tensor that a model is built with."""
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
PROCESSES = 2


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that may be checkpoints, and the folders that hold some."""
    return [
        place
        for place in sorted(folder.rglob("*"))
        if "make" not in place.relative_to(folder).parts
        and (not place.name.endswith(NOT_FIXTURES) or place.name.endswith(".index.json"))
    ]


def run(words: list[str]) -> dict[str, Any]:
    """Run one command in this process, and return its result."""
    from ckptool.cli import main

    written = Path(words[-1]) if words[-2] == "-o" else None
    if written is not None:
        written.unlink(missing_ok=True)
    out, err = io.StringIO(), io.StringIO()
    code: Any
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*words, "--json"])
        except SystemExit as ended:
            code = ended.code or 0
        except Exception as error:
            code = repr(error)
    result = {"code": code, "json": _parsed(out.getvalue()), "err": err.getvalue()}
    if written is not None and written.is_file():
        if written.suffix == ".html":  # the page holds sentences: its data, and not its bytes
            data = written.read_text().partition('id="data">')[2].partition("</script>")[0]
            result["data"] = _parsed(data)
            result["json"].pop("size")
        else:
            result["sha256"] = hashlib.sha256(written.read_bytes()).hexdigest()
    return result


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text or None


def recorded(file: str, after: str | None) -> dict[str, Any]:
    """Return the results of all calls for one file; `after` is the next file in its folder."""
    known: dict[str, str | None] = {"FILE": file, "NEXT": after, "TENSOR": None, "VALUE": None}
    results: dict[str, Any] = {}
    for call, line in CALLS.items():
        words = [known.get(word, word) for word in line.split()]
        if None in words:
            continue
        result = results[call] = run([str(word) for word in words])
        if call == "list" and result["code"] == 0:
            for kind in ("tensor", "value"):
                rows = result["json"][f"{kind}s"]
                known[kind.upper()] = rows[0]["name"] if rows else None
    if results["info"]["code"] == 0:
        results.update(_loads(file, results["list"]["json"], results["info"]["json"]))
    return results


def _loads(file: str, listing: Any, info: Any) -> Iterator[tuple[str, Any]]:
    """Yield results of `load_into` for models like the first state dict or module of a file."""
    from torch import optim

    kinds = {section["kind"]: section for section in reversed(info["sections"])}
    section = kinds.get("state_dict") or kinds.get("module")
    if section is None:
        return
    path, wrappers = section["path"], section["wrappers"]
    below = [row for row in listing["tensors"] if row["path"][:-1] == path]
    rows = {str(row["path"][-1]): row for row in below}
    tied = {name: group[0] for group in info["ties"] for name in group}
    shared = {name: tied.get(row["name"], row["name"]) for name, row in rows.items()}
    bare = {".".join(p for p in n.split(".") if p not in wrappers): row for n, row in rows.items()}
    other = {f"net.{name}": row for name, row in bare.items()}
    other |= {f"net.{name}": {**row, "shape": [3]} for name, row in list(bare.items())[:1]}
    other["head.weight"] = {"dtype": "float32", "shape": [2, 2], "nbytes": 16, "kind": "strided"}
    half = {n: row | {"dtype": "float16"} for n, row in bare.items() if row["dtype"] == "float32"}
    every = {f"allow_{what}": True for what in ("missing", "unexpected", "mismatched")}
    yield "load_into itself", _load(file, model_of(rows, shared), path)
    yield "load_into assign", _load(file, model_of(rows), path, assign=True)
    yield "load_into meta", _load(file, model_of(bare, device="meta"), path)
    yield "load_into half", _load(file, model_of(bare | half), path)
    yield "load_into half allowed", _load(file, model_of(bare | half), path, allow_lossy_cast=True)
    yield "load_into other", _load(file, model_of(other), path)
    yield "load_into other allowed", _load(file, model_of(other), path, **every)
    model = model_of(bare)
    model._register_load_state_dict_pre_hook(lambda *_: None)
    yield "load_into hooked", _load(file, model, path)
    trained = list(model_of(bare).parameters()) if "optimizer" in kinds else []
    for kind, order in product((optim.Adam, optim.SGD), (None, "position") if trained else ()):
        model = model_of(bare)
        options = {"optimizer": kind(model.parameters(), lr=0.1), "optimizer_order": order}
        yield f"load_into {kind.__name__} {order}", _load(file, model, path, **options)


def model_of(rows: Mapping[str, Any], shared: Any = None, device: str = "cpu") -> Any:
    """Build a model of zeros from rows of `list`; names of the same entry in `shared` are tied."""
    import torch

    model, made = torch.nn.Module(), {}
    for name, row in rows.items():
        dtype = getattr(torch, row["dtype"], None)
        if row["kind"] != "strided" or row["nbytes"] > LARGEST or dtype is None:
            continue
        *path, own = name.split(".")
        holder = model
        for part in path:
            holder = holder._modules.setdefault(part, torch.nn.Module())
        tensor = torch.zeros(row["shape"], dtype=dtype, device=device)
        if own in BUFFERS or not (dtype.is_floating_point or dtype.is_complex):
            holder._buffers[own] = tensor
        else:
            one = (shared or {}).get(name, name)
            holder._parameters[own] = made.setdefault(one, torch.nn.Parameter(tensor))
    return model


def _load(file: str, model: Any, path: list[Any], **options: Any) -> dict[str, Any]:
    """Load a file into a model, and return the report or the refusal, and what the model holds."""
    import ckptool

    key = "/".join(map(str, path)) or None
    result: dict[str, Any] = {"code": 0}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            report = ckptool.load_into(model, file, key=key, **options)
        except Exception as error:
            report, hint = getattr(error, "report", None), getattr(error, "hint", None)
            result = {"code": type(error).__name__, "err": f"{error}", "hint": hint and f"{hint}"}
    result |= {"json": report and report.to_dict(), "notes": [str(one.message) for one in warned]}
    result["sha256"] = _digest(model.state_dict(keep_vars=True))
    if "optimizer" in options:
        result["optimizer"] = _digest(options["optimizer"].state_dict())
    return result


def _digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a state dict: names, types, shapes, elements and plain values."""
    return hashlib.sha256(_spelled(state).encode()).hexdigest()


def _spelled(value: Any) -> str:
    import torch

    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_spelled(held)}' for key, held in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_spelled, value))}]"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    about = f"{value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad}"
    if value.is_meta or value.layout != torch.strided:
        return about
    plain = value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    return f"{about} {hashlib.sha256(plain.numpy()).hexdigest()}"


def _prepare(work: str, roots: dict[str, Path]) -> None:
    """Work in a folder of this process's own, in which the folders have the same short names."""
    import torch

    torch.set_num_threads(1)
    folder = Path(work, str(os.getpid()))
    folder.mkdir()
    os.chdir(folder)
    for label, root in roots.items():
        Path(label).symlink_to(root, target_is_directory=True)


def record(target: Path, folders: list[Path]) -> None:
    """Write the record of all files of the folders."""
    import torch

    import ckptool

    labels = [root.name if at == 0 else f"{root.name}-{at + 1}" for at, root in enumerate(folders)]
    roots = dict(zip(labels, folders, strict=True))
    files = {f"{label}/{p.relative_to(r)}": p for label, r in roots.items() for p in files_of(r)}
    pairs = zip(files, list(files)[1:], strict=False)
    after = {a: b for a, b in pairs if files[a].parent == files[b].parent}
    with tempfile.TemporaryDirectory() as work:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(PROCESSES, context, _prepare, (work, roots)) as pool:
            results = pool.map(recorded, files, map(after.get, files), chunksize=4)
            answers = dict(zip(files, results, strict=True))
    made_by = {"package": ckptool.__file__, "torch": torch.__version__, "python": sys.version}
    target.write_text(json.dumps({"made_by": made_by, "files": answers}, indent=0))


def compare(before: Path, after: Path) -> int:
    """Print the differences of two records, those of sentences apart; return the exit code."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    print(f"before: {old['made_by']}\nafter:  {new['made_by']}")
    data, sentences = {}, {}
    for name, calls in old["files"].items():
        for call, result in calls.items():
            for path, a, b in _differences(result, new["files"].get(name, {}).get(call)):
                keys = [step for step in path if isinstance(step, str)]
                lists = sentences if _is_sentence(keys, a) and _is_sentence(keys, b) else data
                line = f"{call}: {'.'.join(keys)}: {_short(a)} -> {_short(b)}"
                lists.setdefault(line.replace(name, "FILE"), []).append(name)
    for title, lists in (("sentences", sentences), ("differences", data)):
        print(f"\n{title}: {sum(map(len, lists.values()))}, of which {len(lists)} are unlike")
        for line, names in sorted(lists.items()):
            print(f"{len(names):5} {names[0]}  {line}")
    return 1 if data else 0


def _differences(a: Any, b: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the place of each difference, and what is there in both records."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _differences(a.get(key), b.get(key), (*path, key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, (*path, at))
    elif a != b:
        yield path, a, b


def _is_sentence(keys: list[str], value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_sentence(keys, one) for one in value)
    key = keys[-1] if keys else ""
    is_one = key in SENTENCES or (key == "what" and " " in str(value))
    return value is None or (isinstance(value, str) and is_one)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"


if __name__ == "__main__":
    if sys.argv[1] == "record":
        asked = [Path(word).resolve() for word in sys.argv[3:]] or [Path("fixtures").resolve()]
        record(Path(sys.argv[2]), asked)
    else:
        sys.exit(compare(Path(sys.argv[2]), Path(sys.argv[3])))
