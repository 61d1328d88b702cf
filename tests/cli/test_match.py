"""match: whether a checkpoint fits a model, and under which names; convert --like: those names."""

import argparse
import csv
import os
import shlex
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

def broken():
    raise ValueError("no data")

def loud():
    print("not a result")
    return net()
"""


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = net()


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def rows(done):
    """The rows of the table, as cells."""
    lines = done.out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("---")) + 1
    found = (line.split(" | ") for line in lines[start : lines.index("", start)])
    return [[cell.strip(" |") for cell in row] for row in found]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a trained model, a reference, and code that builds the model."""
    monkeypatch.chdir(tmp_path)
    model = nn.DataParallel(net())
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, "model.pth")
    torch.save(net().state_dict(), "ref.pth")
    torch.save(Outer().state_dict(), "outer.pth")
    head = dict(net().state_dict())
    head["3.weight"], head["3.bias"] = torch.zeros(9, 5), torch.zeros(9)
    head["extra.weight"] = torch.zeros(2, 2)
    torch.save(head, "head.pth")
    name = f"code_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(NET)
    yield name
    sys.modules.pop(name, None)


def test_what_fits_as_it_is_is_one_line(ckptool, folder):
    done = ckptool("match", "ref.pth", "--like", "ref.pth")
    assert (done.code, done.err) == (0, "")
    assert done.out == "ref.pth fits ref.pth: all 9 tensors match (100% of the parameters)\n"


def test_what_fits_under_other_names_says_how_and_the_command_does_it(ckptool, folder):
    done = ckptool("match", "model.pth", "--like", "outer.pth")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(
        "model.pth fits outer.pth: all 9 tensors match (100% of the parameters)\n\nKey"
    )
    assert [row[1:] for row in rows(done)] == [
        ["RENAMED", "module. removed"],
        ["RENAMED", "encoder. added"],
    ]
    command = shlex.split(done.out.splitlines()[-1])
    assert command == [
        "ckptool", "convert", "model.pth", "model.fitted.pth", "--like", "outer.pth",
    ]  # fmt: skip
    assert ckptool(*command[1:]).code == 0
    found = torch.load("model.fitted.pth", weights_only=True)
    Outer().load_state_dict(found["state_dict"])
    names = found["optimizer"]["param_groups"][0]["param_names"]
    assert names == [name for name, _ in Outer().named_parameters()]
    assert ckptool("match", "model.fitted.pth", "--like", "outer.pth").out.count("\n") == 1


def test_what_does_not_fit_is_a_finding(ckptool, folder):
    done = ckptool("match", "head.pth", "--like", "ref.pth")
    assert (done.code, done.err) == (1, "")
    assert done.out.startswith("head.pth does not fit ref.pth: 7 of 9 tensors match (")
    assert rows(done) == [
        ["extra.weight", "UNEXPECTED"],
        ["3.weight", "MISMATCH", "file [9, 5], model [3, 5]"],
        ["3.bias", "MISMATCH", "file [9], model [3]"],
    ]
    assert "--allow-mismatched keeps the model's tensor" in done.out
    assert done.out.splitlines()[-1] == (
        "hint: add --allow-mismatched=3.weight --allow-mismatched=3.bias "
        "--allow-unexpected=extra.weight"
    )
    assert "ckptool convert" not in done.out


def test_what_is_allowed_is_no_fault(ckptool, folder):
    for allowing, code in (
        (["--allow-unexpected"], 1),
        (["--allow-unexpected", "--allow-mismatched"], 0),
        (["--allow-unexpected=extra.*", "--allow-mismatched=3.*"], 0),
        (["--allow-unexpected", "extra.*", "--allow-mismatched", "3.*"], 0),
        (["--allow-unexpected", "extra.*", "--allow-mismatched", "3.bias"], 1),
        (["--allow-unexpected", "other.*", "--allow-mismatched"], 1),
        (["--allow-unexpected", "--allow-mismatched", "--min-coverage", "0.99"], 1),
        (["--allow-unexpected", "--allow-mismatched", "--min-coverage", "0.1"], 0),
    ):
        for words in (["head.pth", *allowing], [*allowing, "head.pth"]):
            done = ckptool("match", "--like", "ref.pth", *words)
            assert (done.code, done.err) == (code, ""), words


def test_the_word_behind_an_allowance_is_the_file_where_there_is_no_other(ckptool, folder):
    for words in (
        ["--like", "ref.pth", "--allow-unexpected", "--allow-mismatched", "head.pth"],
        ["--allow-unexpected", "head.pth", "--allow-mismatched", "3.*", "--like", "ref.pth"],
    ):
        assert ckptool("match", *words).code == 0
    done = ckptool("match", "--allow-unexpected", "a", "--like", "ref.pth", "b", "c")
    assert done.code == 2
    assert "unexpected extra argument" in done.err


def test_missing_names_may_be_allowed(ckptool, folder):
    assert ckptool("match", "ref.pth", "--like", "head.pth").code == 1
    done = ckptool("match", "ref.pth", "--like", "head.pth", "--allow-mismatched",
                   "--allow-missing", "extra.*")  # fmt: skip
    assert done.code == 0
    assert "with the allowed differences" in done.out


def test_types_that_lose_are_a_finding_and_others_are_not(ckptool, folder):
    half = {name: value.half() for name, value in net().state_dict().items()}
    torch.save(half, "half.pth")
    assert ckptool("match", "half.pth", "--like", "ref.pth", "--key", "").code in (0, 1, 2)
    done = ckptool("match", "ref.pth", "--like", "half.pth")
    assert done.code == 1
    assert "float32 -> float16 (lossy)" in done.out
    assert ckptool("match", "ref.pth", "--like", "half.pth", "--allow-lossy-cast").code == 0


def test_rules_of_the_user_come_first(ckptool, folder):
    torch.save({f"a.b{n}": v for n, v in net().state_dict().items()}, "odd.pth")
    assert ckptool("match", "odd.pth", "--like", "ref.pth", "--rename", r"^a\.b=>").code == 0
    done = ckptool("match", "model.pth", "--like", "outer.pth", "--prefix", "module=encoder")
    assert done.code == 0
    assert "encoder. added" not in done.out


def test_the_command_that_writes_it_says_all_that_was_said(ckptool, folder):
    odd = {f"x.b{name}": value for name, value in net().state_dict().items()}
    torch.save({"a": odd, "b": {"w.x": torch.ones(2)}}, "odd.pth")
    torch.save({"c": net().state_dict(), "d": {"w.x": torch.ones(3)}}, "refs.pth")
    done = ckptool("match", "odd.pth", "--like", "refs.pth", "--key", "a", "--like-key", "c",
                   "--rename", r"^x\.b=>", "--allow-missing=q.*")  # fmt: skip
    command = shlex.split(done.out.splitlines()[-1])
    assert ckptool(*command[1:]).code == 0
    net().load_state_dict(torch.load("odd.fitted.pth", weights_only=True))


def test_a_rule_that_matches_nothing_is_told_and_not_repeated(ckptool, folder):
    words = ["--rename", "^nothing=>fc", "--rename", r"^module\.=>x.", "--rename", r"^x\.=>module."]
    done = ckptool("match", "model.pth", "--like", "ref.pth", *words)
    assert "^nothing=>fc matches no key" in done.out
    (command,) = [line for line in done.out.splitlines() if "ckptool convert" in line]
    assert command.count("--rename") == 2
    assert "nothing" not in command


def test_no_command_writes_less_than_the_model(ckptool, folder):
    more = {**Outer().state_dict(), "head.weight": torch.ones(2)}
    torch.save(more, "more.pth")
    torch.save(AveragedModel(net()).state_dict(), "average.pth")
    for words in (["more.pth", "--allow-missing=head.*"], ["average.pth"]):
        done = ckptool("match", "ref.pth", "--like", *words)
        assert done.code == 0
        assert "ckptool convert" not in done.out


def test_a_share_that_is_none_is_wrong_usage(ckptool, folder):
    for share in ("nan", "inf", "-1", "2", "half"):
        done = ckptool("match", "model.pth", "--like", "ref.pth", f"--min-coverage={share}")
        assert (done.code, done.out) == (2, ""), share
        assert "coverage" in done.err


def test_the_names_of_a_pickled_module_are_written_for_its_weights_alone(ckptool, folder):
    torch.save(nn.DataParallel(net()), "whole.pth")
    done = ckptool("match", "whole.pth", "--like", "ref.pth")
    command = shlex.split(done.out.splitlines()[-1])
    assert ckptool(*command[1:]).code == 0
    net().load_state_dict(torch.load("whole.fitted.pth", weights_only=True))
    done = ckptool("convert", "whole.pth", "out.pth", "--like", "ref.pth")
    assert done.code == 2
    assert "hint: add --model-only" in done.err


def test_several_state_dicts_are_chosen_between_by_name(ckptool, folder):
    torch.save({"a": net().state_dict(), "b": Outer().state_dict()}, "both.pth")
    done = ckptool("match", "both.pth", "--like", "ref.pth")
    assert (done.code, done.out) == (2, "")
    assert "hint: choose one with `--key a` or `--key b`" in done.err
    assert ckptool("match", "both.pth", "--like", "ref.pth", "--key", "a").code == 0
    done = ckptool("match", "ref.pth", "--like", "both.pth")
    assert (done.code, done.out) == (2, "")
    assert "hint: choose one with `--like-key a` or `--like-key b`" in done.err
    assert ckptool("match", "ref.pth", "--like", "both.pth", "--like-key", "b").code == 0


def test_of_several_state_dicts_the_one_that_fits_is_told_first(ckptool, folder):
    torch.save({"ema": {"n": torch.ones(2)}, "model": net().state_dict()}, "both.pth")
    done = ckptool("match", "both.pth", "--like", "ref.pth")
    assert "hint: `--key model` fits; or `--key ema`" in done.err
    done = ckptool("match", "both.pth", "--like", f"{folder}:net")
    assert "hint: `--key model` fits; or `--key ema`" in done.err


def test_code_that_builds_the_model_is_a_reference(ckptool, folder):
    done = ckptool("match", "model.pth", "--like", f"{folder}:net")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(
        "model.pth fits Sequential: all 9 tensors match (100% of the parameters)\n"
    )


def test_what_the_code_prints_is_no_result(ckptool, folder):
    done = ckptool("match", "model.pth", "--like", f"{folder}:loud", "--json")
    assert (done.code, done.document["accepted"]) == (0, True)
    assert "not a result" in done.err


def test_what_goes_wrong_in_the_code_is_a_sentence(ckptool, folder, monkeypatch):
    done = ckptool("match", "model.pth", "--like", f"{folder}:broken")
    assert (done.code, done.out) == (2, "")
    first, second = done.err.splitlines()
    assert first == f"ckptool: {folder}:broken raised ValueError: no data"
    assert second.startswith("hint: ")
    monkeypatch.setenv("CKPTOOL_DEBUG", "1")
    done = ckptool("match", "model.pth", "--like", f"{folder}:broken")
    assert 'raise ValueError("no data")' in done.err


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ("x'", "rename='"),
        ("rename='", "x'"),
        ("allow_missing=['", "x']"),
        ("rename=['a=>b'], x", 'allow_unexpected=["\\x'),
    ],
)
def test_names_that_look_like_arguments_are_names(ckptool, tmp_path, own, wanted):
    file, reference, target = (tmp_path / word for word in ("f.pth", "r.pth", "out.pth"))
    torch.save({own: torch.ones(2), "b": torch.ones(3)}, file)
    torch.save({wanted: torch.ones(4), "b": torch.ones(3)}, reference)
    for verb, code in ((("match",), 1), (("convert", "-o", target), 2)):
        done = ckptool(*verb, file, "--like", reference)
        assert done.code == code
        assert "unexpected error" not in done.err


WORDS = ("rename", "key", "like_key", "min_coverage", "strict", "prefixes", "optimizer_order", *(
    f"allow_{what}" for what in ("missing", "unexpected", "mismatched", "lossy_cast")
))  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_words_of_the_library_and_the_command_line_are_names(ckptool, tmp_path, word):
    file, reference = tmp_path / "f.pth", tmp_path / "r.pth"
    torch.save({"b": torch.ones(3)}, file)
    for form in ("{}", "head.{}.w", "{}=0", "{}='a=>b'", "--{}"):
        name = form.format(word)
        torch.save({name: torch.ones(4), "b": torch.ones(3)}, reference)
        done = ckptool("match", file, "--like", reference, "--json")
        assert done.document["remedy"]["options"] == [f"--allow-missing={name}"]
        assert shlex.split(done.document["remedy"]["text"]) == [f"--allow-missing={name}"]
        assert ckptool("match", file, "--like", reference, f"--allow-missing={name}").code == 0


def test_an_option_that_is_advised_has_the_name_as_the_file_has_it(ckptool, tmp_path):
    file, reference = tmp_path / "f.pth", tmp_path / "r.pth"
    own = ["rename='^a=>b', allow_missing=True; key='x'", "it's $HOME", "--json", "\x1b#0m"]
    rest = {f"b.{number}": torch.ones(3) for number in range(30)}
    torch.save({**dict.fromkeys(own[:3], torch.ones(2)), **rest}, file)
    torch.save({own[3]: torch.ones(4), **rest}, reference)
    done = ckptool("match", file, "--like", reference, "--json")
    given = [f"--allow-unexpected={name}" for name in own[:3]]
    assert done.document["remedy"]["options"] == [f"--allow-missing={own[3]}", *given]
    done = ckptool("match", file, "--like", reference, *done.document["remedy"]["options"])
    assert done.code == 0
    done = ckptool("match", file, "--like", reference)
    (hint,) = [line for line in done.out.splitlines() if line.startswith("hint: ")]
    told = shlex.split(hint.removeprefix("hint: "))
    assert (told[0], told[2:]) == ("add", given)
    assert "--allow-missing=$'\\033#0m'" in hint


def test_what_is_proposed_is_enough(ckptool, tmp_path):
    file, reference = ({f"{name}.{n}.fc.w": torch.ones(3, 3) for n in range(4)}
                       for name in ("encoder_q", "encoder"))  # fmt: skip
    torch.save({**file, "queue": torch.ones(9)}, tmp_path / "f.pth")
    torch.save({**reference, "fc": torch.ones(7)}, tmp_path / "r.pth")
    words = [tmp_path / "f.pth", "--like", tmp_path / "r.pth"]
    done = ckptool("match", *words)
    *_, hint = done.out.splitlines()
    assert "PROPOSED" in done.out
    assert hint == (
        "hint: `--rename '^encoder_q\\.=>encoder.' --allow-missing=fc --allow-unexpected=queue` "
        "(the model keeps its own fc; left out: queue)"
    )
    remedy = ckptool("match", *words, "--json").document["remedy"]
    assert f"hint: {remedy['text']}" == hint
    assert ckptool("match", *words, *remedy["options"]).code == 0
    done = ckptool("convert", words[0], tmp_path / "out.pth", *words[1:])
    assert "hint: `--rename '^encoder_q\\.=>encoder.' --allow-missing" in done.err


@pytest.mark.parametrize(
    "words", [["gone.pth", "--like", "ref.pth"], ["ref.pth", "--like", "gone.pth"]]
)
def test_what_is_not_there_is_an_error(ckptool, folder, words):
    done = ckptool("match", *words)
    assert (done.code, done.out) == (2, "")
    assert "no such file" in done.err
    assert ckptool("match", "ref.pth").code == 2


def test_the_document_has_the_report_and_what_became_of_it(ckptool, folder):
    done = ckptool("match", "head.pth", "--like", "ref.pth", "--json")
    assert (done.code, done.err) == (1, "")
    document = done.document
    assert document["schema"] == "ckptool.match/1"
    assert (document["file"], document["model"]) == ("head.pth", "ref.pth")
    assert (document["fits"], document["accepted"]) == (False, False)
    assert {problem["kind"] for problem in document["problems"]} >= {"unexpected", "mismatched"}
    done = ckptool("match", "head.pth", "--like", "ref.pth", "--json", "--allow-unexpected",
                   "--allow-mismatched")  # fmt: skip
    document = done.document
    assert (done.code, document["fits"], document["accepted"]) == (0, False, True)
    assert document["problems"] == []
    assert document["remedy"] is None


def test_a_table_alone_has_a_row_for_each_tensor(ckptool, folder):
    done = ckptool("match", "model.pth", "--like", "ref.pth", "--fmt", "csv")
    headings, *found = csv.reader(done.out.splitlines())
    assert headings == ["Key", "Status", "Details"]
    assert found[0] == ["module.0.weight", "RENAMED", "0.weight (module. removed)"]
    assert len(found) == 9
    assert "RENAMED: " in done.err
    assert ckptool("match", "model.pth", "--like", "ref.pth", "--fmt", "csv", "-q").err == ""


def test_without_folding_each_tensor_has_its_row(ckptool, folder):
    assert len(rows(ckptool("match", "model.pth", "--like", "ref.pth", "--no-fold"))) == 9


def test_control_characters_of_a_name_are_escaped(ckptool, folder):
    torch.save({**net().state_dict(), "a\x1b[31m\u202e": torch.ones(2)}, "evil.pth")
    done = ckptool("match", "evil.pth", "--like", "ref.pth")
    assert done.code == 1
    assert done.out.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "target",
    ["out.pth", "out.safetensors", "out.safetensors.index.json", "out.bin", "legacy.pth"],
)
def test_convert_writes_the_names_of_the_reference_in_every_format(ckptool, folder, target):
    more = ["--max-shard-size", "100B"] if "index" in target or "bin" in target else []
    more += ["--format", "torch-legacy"] if target == "legacy.pth" else []
    done = ckptool("convert", "model.pth", f"out/{target}", "--like", "outer.pth", *more)
    assert done.code == 0, done.err
    found = {}
    for path in os.listdir("out"):
        if path.endswith(".safetensors"):
            found.update(load_file(f"out/{path}"))
        elif not path.endswith(".json"):
            found.update(torch.load(f"out/{path}", weights_only=True))
    found = found.get("state_dict", found)
    Outer().load_state_dict(found)
    assert all(found[name].dtype == value.dtype for name, value in Outer().state_dict().items())


def test_wrappers_of_the_reference_are_put_on(ckptool, folder):
    torch.save(nn.DataParallel(net()).state_dict(), "dp.pth")
    done = ckptool("convert", "ref.pth", "out.safetensors", "--like", "dp.pth")
    assert done.code == 0, done.err
    nn.DataParallel(net()).load_state_dict(load_file("out.safetensors"))


def test_convert_refuses_what_does_not_fit_and_writes_nothing(ckptool, folder):
    before = sorted(os.listdir())
    done = ckptool("convert", "head.pth", "out.pth", "--like", "ref.pth")
    assert (done.code, done.out) == (2, "")
    first, second = done.err.splitlines()
    assert first.startswith("ckptool: head.pth does not fit ref.pth: 7 of 9 tensors match (")
    assert "); 2 tensors are of another shape: " in first
    assert second == (
        "hint: --allow-mismatched=3.weight --allow-mismatched=3.bias "
        "--allow-unexpected=extra.weight"
    )
    assert sorted(os.listdir()) == before


def test_what_convert_allows_is_left_out_and_named(ckptool, folder):
    done = ckptool("convert", "head.pth", "out.pth", "--like", "ref.pth", "--allow-unexpected",
                   "--allow-mismatched", "3.*")  # fmt: skip
    assert done.code == 0, done.err
    assert "left out: 1 key of the root that the model does not have: extra.weight" in done.err
    assert "left out: 2 keys of the root with another shape than in the model: 3.weight" in done.err
    gone = {"extra.weight", "3.weight", "3.bias"}
    assert torch.load("out.pth", weights_only=True).keys() == torch.load("head.pth").keys() - gone
    quiet = ckptool("convert", "head.pth", "out.pth", "--like", "ref.pth", "--allow-unexpected",
                    "--allow-mismatched", "-q", "--force")  # fmt: skip
    assert (quiet.code, quiet.err) == (0, "")
    all_of_it = ("--allow-unexpected", "--allow-mismatched")
    assert ckptool("convert", *all_of_it, "head.pth", "b.pth", "--like", "ref.pth").code == 0
    assert ckptool("convert", "--like", "ref.pth", *all_of_it, "head.pth", "-o", "c.pth").code == 0


def test_renames_come_before(ckptool, folder):
    torch.save({f"a.b{n}": v for n, v in net().state_dict().items()}, "odd.pth")
    done = ckptool("convert", "odd.pth", "out.pth", "--like", "outer.pth", "--rename", r"^a\.b=>")
    assert done.code == 0, done.err
    Outer().load_state_dict(torch.load("out.pth", weights_only=True))


def test_a_model_of_the_users_code_is_a_reference_for_names(ckptool, folder):
    done = ckptool("convert", "model.pth", "out.pth", "--like", f"{folder}:net", "--model-only")
    assert done.code == 0, done.err
    net().load_state_dict(torch.load("out.pth", weights_only=True))


def test_convert_refuses_names_that_are_one_tensor_in_the_model_and_differ(ckptool, tmp_path):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    torch.save({f"net.{name}": value for name, value in model.state_dict().items()}, tmp_path / "f")
    model[1].weight = model[0].weight
    torch.save(model.state_dict(), tmp_path / "r")
    words = [tmp_path / "f", tmp_path / "out.pth", "--like", tmp_path / "r"]
    done = ckptool("convert", *words)
    assert (done.code, done.out) == (2, "")
    assert "are tied in the model, but differ in the file" in done.err
    assert not (tmp_path / "out.pth").exists()
    assert "hint: untie them in the model, or keep only one of them in the file" in done.err
    ckptool("convert", words[0], tmp_path / "one.pth", "--exclude", "net.1.weight")
    assert ckptool("convert", tmp_path / "one.pth", *words[1:]).code == 0
    assert torch.load(tmp_path / "out.pth").keys() == {"0.weight", "1.weight"}


def test_what_cannot_be_made_of_a_file_is_told_by_its_header(ckptool, tmp_path):
    state = {"w": torch.ones(2), "_extra_state": argparse.Namespace(a=1)}
    torch.save(state, tmp_path / "f.pth")
    done = ckptool("match", tmp_path / "f.pth", "--like", tmp_path / "f.pth")
    assert done.code == 1
    assert "contains an object of argparse.Namespace" in done.out
    done = ckptool("convert", tmp_path / "f.pth", tmp_path / "o.pth", "--like", tmp_path / "f.pth")
    assert done.code == 0  # it is written as it is
    assert torch.load(tmp_path / "o.pth", weights_only=False)["_extra_state"].a == 1


def test_axes_that_nothing_decides_are_asked_for_and_the_command_has_the_answer(
    ckptool, fixtures, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    flax = fixtures / "layouts" / "images.msgpack"
    names = ["conv.weight", "square.weight", "head.weight"]
    sizes = {"conv": (4, 3, 3, 2), "square": (4, 4), "head": (5, 4)}
    model = {f"{name}.weight": torch.zeros(size) for name, size in sizes.items()}
    model |= {f"{name}.bias": torch.zeros(size[0]) for name, size in sizes.items()}
    norm = ("weight", "bias", "running_mean", "running_var")
    torch.save(model | {f"norm.{name}": torch.zeros(4) for name in norm}, "state.pth")
    done = ckptool("match", flax, "--like", "state.pth")
    assert done.code == 1
    assert [row[:2] for row in rows(done) if row[1] == "LAYOUT"] == [[n, "LAYOUT"] for n in names]
    assert "`--no-transpose conv.weight --no-transpose square.weight" in done.out
    document = ckptool("match", flax, "--like", "state.pth", "--json").document
    assert document["problems"][0]["kind"] == "layout"
    options = [word for name in names for word in ("--transpose", name)]
    assert document["remedy"]["options"] == options
    done = ckptool("match", flax, "--like", "state.pth", *options)
    assert done.code == 0
    command = shlex.split(done.out.splitlines()[-1])
    command[3] = "fitted.safetensors"
    assert ckptool(*command[1:]).code == 0
    found = load_file("fitted.safetensors")
    assert [found[name].shape for name in names] == [model[name].shape for name in names]


def test_what_does_not_go_together_is_wrong_usage(ckptool, folder):
    for words in (
        ["--like", "ref.pth", "--wrappers", "strip"],
        ["--like-key", "a"],
        ["--allow-missing"],
        ["--min-coverage", "0.5"],
        ["--transpose", "*"],
        ["--like", "ref.pth", "--transpose", "*=0,0"],
    ):
        done = ckptool("convert", "model.pth", "out.pth", *words)
        assert (done.code, done.out) == (2, ""), words
        assert not os.path.exists("out.pth")
