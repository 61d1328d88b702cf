"""The machine that reports its steps: which, where, and what it leaves."""

import pickle
import pickletools

from ckptool.inspection.scan_calls import to_python
from ckptool.limits import DEFAULT_LIMITS
from ckptool.symbolic.machine import Machine
from ckptool.symbolic.opcodes import HANDLERS
from ckptool.symbolic.watching import Watcher, is_unknown


class Noting(Watcher):
    def __init__(self, data):
        super().__init__(data, file="x", limits=DEFAULT_LIMITS)
        self.events = []

    def report(self, kind, what, items=None):
        self.events.append((self.at, kind, what, items))
        return what


def watched(data):
    machine = Noting(data)
    return machine.run(0)[0], machine.events


class Thing:
    def __init__(self):
        self.a = 1


def test_each_step_is_reported_where_its_opcode_stands():
    for protocol in range(6):
        data = pickle.dumps([Thing(), range(3), complex(1, 2)], protocol)
        _, events = watched(data)
        named = {position: opcode.name for opcode, _, position in pickletools.genops(data)}
        by_opcode = {
            "import": {"GLOBAL", "STACK_GLOBAL", "INST"},
            "call": {"REDUCE", "OBJ", "INST"},
            "new": {"NEWOBJ"},
            "build": {"BUILD"},
        }
        assert all(named[at] in by_opcode[kind] for at, kind, *_ in events), protocol
        assert {kind for _, kind, *_ in events} >= {"import", "call", "build"}, protocol


def test_what_is_not_in_the_file_is_a_symbol():
    root, events = watched(b"\x80\x04h\x05.")
    assert is_unknown(root)
    assert [(at, kind, why) for at, kind, _, why in events] == [
        (2, "unknown", "memo 5 was never set")
    ]


def test_changes_of_what_is_not_plain_data_are_reported():
    _, events = watched(b"\x80\x02cos\nenviron\nU\x01aU\x01bs0]K\x01a0csys\npath\nK\x01a.")
    changes = [(kind, to_python(what), items) for _, kind, what, items in events]
    assert [change for change in changes if change[0] != "import"] == [
        ("set", "os.environ", [("a", "b")]),
        ("append", "sys.path", [1]),
    ]


def test_ordinary_reads_have_the_table_without_reports():
    assert Machine.handlers is HANDLERS
    assert Watcher.handlers is not HANDLERS


def test_a_value_is_spelled_as_python_and_cut():
    deep = [[[[[[[[[[1]]]]]]]]]]
    assert to_python({"a": (1,), "b": [b"x", None, 1.5]}) == "{'a': (1,), 'b': [b'x', None, 1.5]}"
    assert to_python(deep).count("[") == 9
    assert to_python("x" * 1000) == repr("x" * 120) + "..."
    assert to_python(list(range(1000))) == "[0, 1, 2, 3, 4, 5, ...]"
    assert len(to_python([["x" * 100] * 100] * 100)) < 50_000
