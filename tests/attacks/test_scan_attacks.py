"""What hostile pickles do is said, call by call; each trick is one that got past some scanner."""

import bz2
import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import zipfile
import zlib

import pytest
import torch

from ckptool.inspection import scan as scanning
from ckptool.inspection.scan import scan
from tests.attacks.test_pickle_attacks import COMMAND, PAYLOADS, as_files, call, text

SYSTEM = PAYLOADS["REDUCE of os.system"]
CALL = f"os.system({COMMAND!r})"


def judged(tmp_path, data, name="file.bin"):
    path = tmp_path / name
    path.write_bytes(data)
    return scan(path)


def texts(found):
    return [call.text for stream in found.streams for call in stream.calls]


def is_found(found, part):
    return found.verdict == "runs" and any(part in one for one in texts(found))


def test_each_payload_in_each_kind_of_file_is_a_finding(tmp_path):
    for name, payload in PAYLOADS.items():
        for file in as_files(tmp_path, payload):
            found = scan(file)
            expected = "cannot tell" if name == "copyreg extension" else "runs"
            assert found.verdict == expected, (name, file, found)
            assert texts(found), (name, file)


ADVISORIES = """
CVE-2025-1716 pip:main
CVE-2025-46417 ssl:get_server_certificate linecache:getline
CVE-2025-10157 asyncio.unix_events:_UnixSubprocessTransport._start
GHSA-3gf5-cxq9-w223 idlelib.pyshell:ModifiedInterpreter.runcode
GHSA-3vg9-h568-4w9m idlelib.debugobj:ObjectTreeItem.SetText
GHSA-4675-36f9-wf6r ctypes:CDLL
GHSA-46h3-79wf-xr6c _operator:attrgetter
GHSA-49gj-c84q-6qm9 cProfile:run
GHSA-4r9r-ch6f-vxmx torch.utils.bottleneck.__main__:run_cprofile
GHSA-4whj-rm5r-c2v8 torch.utils.bottleneck.__main__:run_autograd_prof
GHSA-5qwp-399c-mjwf trace:Trace.run
GHSA-6vqj-c2q5-j97w profile:Profile.runctx
GHSA-6w4w-5w54-rjvr idlelib.autocomplete:AutoComplete.get_entity
GHSA-7cq8-mj8x-j263 idlelib.autocomplete:AutoComplete.fetch_completions
GHSA-7wx9-6375-f5wh profile:run
GHSA-84r2-jw7c-4r5q pydoc:locate operator:methodcaller
GHSA-86cj-95qr-2p4f torch._dynamo.guards:GuardBuilder.get
GHSA-8r4j-24qv-fmq9 idlelib.calltip:Calltip.fetch_tip
GHSA-955r-x9j8-7rhh _operator:methodcaller
GHSA-9w88-8rmg-7g2p cProfile:runctx
GHSA-9xph-j2h6-g47v idlelib.calltip:get_entity
GHSA-cj3c-v495-4xqh code:InteractiveInterpreter.runcode
GHSA-f4x7-rfwp-v3xw torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_guards_expression
GHSA-f54q-57x4-jg88 lib2to3.pgen2.grammar:Grammar.loads
GHSA-f745-w6jp-hpxx torch.utils.collect_env:run
GHSA-fqq6-7vqf-w3fg doctest:debug_script
GHSA-g344-hcph-8vgg trace:Trace.runctx
GHSA-g38g-8gr9-h9xp uuid:_get_command_stdout _osx_support:_read_output
GHSA-g38g-8gr9-h9xp _aix_support:_read_cmd_output imaplib:IMAP4_stream _pyrepl.pager:pipe_pager
GHSA-g38g-8gr9-h9xp test.support.script_helper:assert_python_ok
GHSA-h3qp-7fh3-f8h4 torch.utils.data.datapipes.utils.decoder:basichandlers
GHSA-j343-8v2j-ff7w idlelib.pyshell:ModifiedInterpreter.runcommand
GHSA-jgw4-cr84-mqxg asyncio.unix_events:_UnixSubprocessTransport._start
GHSA-jhph-76pp-mggw torch.utils.collect_env:run
GHSA-m273-6v24-x4m4 distutils.file_util:write_file
GHSA-m869-42cg-3xwr idlelib.run:Executive.runcode
GHSA-p9w7-82w4-7q8m lib2to3.pgen2.pgen:ParserGenerator.make_label
GHSA-q77w-mwjj-7mqx asyncio.unix_events:_UnixSubprocessTransport._start
GHSA-r8g5-cgf2-4m4m numpy.f2py.crackfortran:getlincoef
GHSA-vqmv-47xg-9wpr pty:spawn
GHSA-vr7h-p6mm-wpmh torch.jit.unsupported_tensor_ops:execWrapper
GHSA-vv6j-3g6g-2pvj torch.utils._config_module:ConfigModule.load_config
GHSA-vvpj-8cmc-gx39 pkgutil:resolve_name
GHSA-x696-vm39-cp64 profile:Profile.run
GHSA-xp4f-hrf8-rxw7 ensurepip:_run_pip
GHSA-r7v6-mfhq-g3m2 pty:spawn
GHSA-565g-hwwr-4pp3 marshal:loads types:FunctionType
GHSA-wfq2-52f7-7qvj runpy:run_path
GHSA-p523-jq9w-64x9 cProfile:run
GHSA-5hvc-6wx8-mvv4 pydoc:locate ctypes:CDLL
GHSA-q5qq-mvfm-j35x importlib:import_module code:InteractiveInterpreter
GHSA-q5qq-mvfm-j35x multiprocessing.util:spawnv_passfds
"""
"""Of picklescan and, the last seven lines, fickling: what their lists of names lacked."""


FUNCTIONS = """
_io.FileIO aiohttp.client.ClientSession bdb.Bdb.run builtins.__import__ builtins.exec builtins.eval
cloudpickle.cloudpickle._make_function cloudpickle.cloudpickle.subimport dill._dill._create_function
functools.reduce httplib.HTTPSConnection joblib.load logging.FileHandler logging.config._resolve
numpy.testing._private.utils.runstring numpy.load numpy.memmap pandas.read_pickle pickle.loads
pydoc.pipepager requests.api.get runpy._run_code sklearn.utils._testing.check_skip_network
shutil.rmtree socket.create_connection sys.exit timeit.timeit torch._inductor.codecache.compile_file
torch.fx.graph_module.reduce_graph_module torch.hub.load torch.load torch.serialization.load
types.CodeType urllib.request.urlopen venv.create webbrowser.open some.package.run
__builtin__.execfile __builtin__.apply commands.getoutput zipimport.zipimporter nt.system
"""
"""More of them, of the same kinds."""


def split(name):
    """Module and name as a pickle has them: a class's method after the module."""
    parts = name.split(".")
    at = next(
        (i for i, one in enumerate(parts[:-1]) if one.strip("_")[:1].isupper()), len(parts) - 1
    )
    return ".".join(parts[:at]), ".".join(parts[at:])


def test_any_function_that_is_no_known_constructor_runs(tmp_path):
    advised = [name.split(":") for name in ADVISORIES.split() if ":" in name]
    for module, function in [*advised, *map(split, FUNCTIONS.split())]:
        for arguments in ([text("id")], [text("x"), text("y")]):
            data = b"\x80\x02" + call(module, function, *arguments) + b"."
            found = judged(tmp_path, data)
            said = {"__builtin__": "builtins", "nt": "os"}.get(module, module)
            assert is_found(found, f"{said}.{function}("), found
            assert found.streams[0].told >= 1, found


def stack_global(module, name):
    return text(module) + text(name) + b"\x93"


GETATTR = b"cbuiltins\ngetattr\n"
ARGUMENT = text(COMMAND) + b"\x85R"
TRICKS = {
    "the result is popped": b"\x80\x02" + call("os", "system", text(COMMAND)) + b"0N.",
    "the result is popped with the mark": b"\x80\x02("
    + call("os", "system", text(COMMAND))
    + b"1N.",
    "overwritten in the memo": b"\x80\x02cos\nsystem\nq\x00h\x00" + ARGUMENT + b"q\x000N.",
    "through a module": b"\x80\x04"
    + stack_global("torch.serialization", "os.system")
    + ARGUMENT
    + b".",
    "a name only, through a module": b"\x80\x04" + stack_global("copy", "os.system") + b".",
    "getattr of what getattr gave": b"\x80\x02"
    + GETATTR
    + b"("
    + GETATTR
    + b"cos\npath\n"
    + text("os")
    + b"\x86R"
    + text("system")
    + b"tR"
    + ARGUMENT
    + b".",
    "attrgetter": b"\x80\x02"
    + call("operator", "attrgetter", text("system"))
    + b"cos\npath\n\x85R.",
    "itemgetter over modules": b"\x80\x02"
    + call("operator", "itemgetter", text("os"))
    + b"csys\nmodules\n\x85R.",
    "partial, called": b"\x80\x02cfunctools\npartial\n(cos\nsystem\n" + text(COMMAND) + b"tR)R.",
    "partial, made": b"\x80\x02cfunctools\npartial\n(cos\nsystem\n" + text(COMMAND) + b"tR.",
    "partial, given another function": b"\x80\x02cfunctools\npartial\n(cm\nf\ntR"
    + b"(cos\nsystem\n)}Ntb.",
    "map, consumed": b"\x80\x02cbuiltins\nbytes\ncbuiltins\nmap\ncos\nsystem\n("
    + text(COMMAND)
    + b"t\x86\x81\x85\x81.",
    "iter of a function": b"\x80\x02cbuiltins\niter\n(cos\ngetpid\nK\x00tR.",
    "a factory of defaultdict": b"\x80\x02"
    + call("collections", "defaultdict", b"cos\ngetcwd\n")
    + b".",
    "a function that a constructor calls": b"\x80\x02"
    + call("numpy.random._pickle", "__generator_ctor", text("id"), b"ctorch.hub\nload\n")
    + b".",
    "a class that a constructor calls": b"\x80\x02"
    + call("numpy.random._pickle", "__generator_ctor", text("id"), b"cimaplib\nIMAP4_stream\n")
    + b".",
    "a function that a tensor's type applies": b"\x80\x02"
    + call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        b"ctorch.hub\nload\n",
        b"cm\nT\n",
        b"(U\x01xt",
        b"N",
    )
    + b".",
    "a function that makes an array of JAX": b"\x80\x02"
    + call(
        "jax._src.array",
        "_reconstruct_array",
        b"cos\nsystem\n",
        b"(" + text(COMMAND) + b"t",
        b"(t",
        b"}",
    )
    + b".",
    "a base of _reconstructor": b"\x80\x02ccopyreg\n_reconstructor\n(csubprocess\nPopen\n"
    + b"csubprocess\nPopen\n"
    + text(COMMAND)
    + b"tR.",
    "__newobj__ with arguments": b"\x80\x02ccopyreg\n__newobj__\n(csubprocess\nPopen\n"
    + text(COMMAND)
    + b"tR.",
    "a metaclass": b"\x80\x02cbuiltins\ntype\n(X\x01\x00\x00\x00X)}t\x81.",
    "an item of os.environ": b"\x80\x02cos\nenviron\n" + text("A") + text("b") + b"s.",
    "items of sys.modules": b"\x80\x02csys\nmodules\n(" + text("os") + b"Nu.",
    "sys.path.append": b"\x80\x02csys\npath\n" + text("/tmp") + b"a.",
    "the state of a module": b"\x80\x02csys\nmodules\n}" + text("a") + b"Nsb.",
    "the state of what getattr gave": b"\x80\x02"
    + GETATTR
    + b"(cmodels\nNet\n"
    + text("config")
    + b"tR}"
    + text("a")
    + b"Nsb.",
    "append, once it is an attribute": b"\x80\x02cmodels\nNet\n)\x81}"
    + text("append")
    + b"cos\nsystem\nsb"
    + text(COMMAND)
    + b"a.",
    "ChainMap over sys.modules": b"\x80\x02ccollections\nChainMap\n)\x81}"
    + text("maps")
    + b"](csys\nmodules\nesb"
    + text("os")
    + b"Ns.",
    "Popen that another module imported": b"\x80\x02"
    + call("some.package", "Popen", text(COMMAND))
    + b".",
    "getattr of a dunder": b"\x80\x02"
    + GETATTR
    + b"cmodels\nNet\n"
    + text("__subclasses__")
    + b"\x86R)R.",
    "a bound method, called": b"\x80\x02"
    + GETATTR
    + call("pathlib", "PosixPath", text("x"))
    + text("write_text")
    + b"\x86R"
    + ARGUMENT
    + b".",
    "a class that is given a function": b"\x80\x02"
    + call("models", "Net", b"cos\nsystem\n")
    + b".",
    "eval, but not Paddle's": b"\x80\x02"
    + call("builtins", "eval", text("data + x"), b"}" + text("data") + b"Ns")
    + b".",
    "a pickle in pickle.loads": b"\x80\x03"
    + call("pickle", "loads", b"B" + struct.pack("<I", len(SYSTEM)) + SYSTEM)
    + b".",
    "a class by INST": b"(S'x'\nisubprocess\nPopen\n.",
}

WRAPPER = (
    b"cwsgiref.util\nFileWrapper\n)\x81}("
    + text("filelike")
    + b"cargparse\nNamespace\n)\x81}"
    + text("read")
    + b"cos\nsystem\nsb"
    + text("blksize")
    + text(COMMAND)
    + b"ub"
)
"""An iterator each step of which calls `os.system`."""
ENVIRON = call("numpy.core", "_ufunc_reconstruct", text("os"), text("environ"))
TRICKS |= {
    "an attribute that a stdlib class computes": b"\x80\x02"
    + GETATTR
    + b"(cctypes\nLibraryLoader\n)\x81}"
    + text("_dlltype")
    + b"cos\nsystem\nsb"
    + text(COMMAND)
    + b"tR.",
    "a function of numpy's that finds any function": b"\x80\x02"
    + call(
        "numpy.random._pickle",
        "__generator_ctor",
        text(COMMAND),
        call("numpy.core", "_ufunc_reconstruct", text("os"), text("system")),
    )
    + b".",
    "items of what such a function finds": b"\x80\x02" + ENVIRON + text("A") + text("b") + b"s.",
    "items of what getattr finds for a tensor's type": b"\x80\x02"
    + b"ctorch._tensor\n_rebuild_from_type_v2\n("
    + GETATTR
    + b"cos\n_Environ\n("
    + call("builtins", "getattr", b"ctorch\nserialization\n", text("os"))
    + text("environ")
    + b"t}tR"
    + text("A")
    + text("b")
    + b"s.",
    "an iterator, for a list by _reconstructor": b"\x80\x02"
    + call("copyreg", "_reconstructor", *[b"cbuiltins\nlist\n"] * 2, WRAPPER)
    + b".",
    "an iterator whose parts are filled later": b"\x80\x02cargparse\nNamespace\n)\x81q\x000"
    + b"cwsgiref.util\nFileWrapper\n)\x81}"
    + text("filelike")
    + b"h\x00sbq\x010h\x00}"
    + text("read")
    + b"cos\nsystem\nsb0cbuiltins\nset\n(h\x01tR.",
}  # each of these was loaded, and did run
for consumer in ("builtins.set", "builtins.bytearray", "collections.OrderedDict", "torch.Size"):
    TRICKS[f"an iterator, for {consumer}"] = (
        b"\x80\x02" + call(*consumer.split("."), WRAPPER) + b"."
    )
    files = b"cfileinput\nFileInput\n)\x81}(" + text("_files") + text("x") + b"\x85"
    files += text("_inplace") + b"\x88ub"  # which renames x, and begins it anew
    TRICKS[f"an iterator without a function, for {consumer}"] = (
        b"\x80\x02" + call(*consumer.split("."), files) + b"."
    )

SAVER = (
    b"ctorch.utils.data.datapipes.iter.utils\nSaverIterDataPipe\n)\x81}("
    + text("source_datapipe")
    + b"](("
    + text("/tmp/x")
    + b"U\x01xte"
    + text("mode")
    + text("w")
    + text("filepath_fn")
    + b"Nub"
)
"""An iterator of torch's that writes a file."""
TRICKS |= {
    "an iterator of torch's, for a list": b"\x80\x02" + call("builtins", "list", SAVER) + b".",
    "an iterator of torch's, for a pair of a dict": b"\x80\x02"
    + call("collections", "OrderedDict", b"](" + SAVER + b"e")
    + b".",
    "an iterator of torch's, as a state": b"\x80\x02cuuid\nUUID\n)\x81" + SAVER + b"b.",
    "an iterator of torch's, in a state": b"\x80\x02crandom\nRandom\n)\x81(K\x03" + SAVER + b"Ntb.",
    "a stream in a code page": b"\x80\x02"
    + call(
        "torch.storage",
        "_load_from_bytes",
        call("_codecs", "encode", text(SYSTEM.decode("cp037")), text("cp037")),
    )
    + b".",
    "a stream that a call makes": b"\x80\x02"
    + call("torch.storage", "_load_from_bytes", call("m", "A", b"K\x01"))
    + b".",
    "an integer that Python does not print": b"\x80\x02"
    + call("os", "system", b"L0x" + b"f" * 9000 + b"L\n")
    + b".",
    "a dunder of a class, by its qualified name": b"\x80\x04"
    + stack_global("models", "Net.__subclasses__")
    + b")R.",
}
MODULE = call("builtins", "getattr", b"ctorch\nserialization\n", text("os"))
TRICKS |= {
    "a function through modules, for a class": b"\x80\x02"
    + call(
        "models",
        "Net",
        call(
            "functools", "partial", call("builtins", "getattr", MODULE, text("system")), text("x")
        ),
    )
    + b".",
    "the state of what a tensor's type finds": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n("
    + GETATTR
    + b"clogging\nManager\n(clogging\nLogger\n"
    + text("manager")
    + b"t}"
    + text("disable")
    + b"K\x01stR.",
    "a class that newer Pythons lack": b"\x80\x02csmtpd\nSMTPServer\n)\x81.",
}
CLOSER = text("name") + text("/tmp/x") + text("delete") + b"\x88" + text("close_called") + b"\x89"
"""The state of an object that deletes a file when it goes."""
MAKERS = {
    "NEWOBJ": b"ctempfile\n_TemporaryFileCloser\n)\x81",
    "NEWOBJ_EX": b"ctempfile\n_TemporaryFileCloser\n)}\x92",
    "OBJ": b"(ctempfile\n_TemporaryFileCloser\no",
    "INST": b"(itempfile\n_TemporaryFileCloser\n",
    "_reconstructor": b"ccopyreg\n_reconstructor\n(ctempfile\n_TemporaryFileCloser\n"
    b"cbuiltins\nobject\nNtR",
    "__newobj__": b"ccopyreg\n__newobj__\nctempfile\n_TemporaryFileCloser\n\x85R",
    "a base class of Python 2": b"ccopy_reg\n_reconstructor\n(ctempfile\n_TemporaryFileCloser\n"
    b"c__builtin__\nobject\nNtR",
}
for how, made in MAKERS.items():
    TRICKS[f"a file that is deleted by what {how} makes"] = (
        b"\x80\x02" + made + b"}(" + CLOSER + b"ub."
    )


def test_tricks_of_opcodes(tmp_path):
    for trick, data in TRICKS.items():
        found = judged(tmp_path, data)
        assert found.verdict == "runs", (trick, found)
        assert texts(found), trick


STATES = """
dbm.dumb._Database shelve.Shelf zipfile.ZipFile subprocess.Popen tempfile._TemporaryFileWrapper
tempfile.SpooledTemporaryFile weakref.finalize multiprocessing.util.Finalize wave.Wave_write
urllib.request.URLopener asyncio.base_events.BaseEventLoop fileinput.FileInput ssl.SSLContext
multiprocessing.pool.Pool telnetlib.Telnet joblib.memory.Memory aiohttp.client.ClientSession
"""
"""Classes with a `__del__` or a `__setstate__` that does something, a few of them."""


def test_a_class_of_the_standard_library_runs_by_its_state_alone(tmp_path):
    state = b"}" + text("_datfile") + text("/tmp/x") + b"sb."
    for name in STATES.split():
        made = "c{}\n{}\n".format(*split(name)).encode() + b")\x81"
        found = judged(tmp_path, b"\x80\x02" + made + state)
        assert is_found(found, f"{name}.__new__().__setstate__({{'_datfile': '/tmp/x'}})"), name


def test_a_pickle_in_an_argument_is_looked_into(tmp_path):
    found = judged(tmp_path, TRICKS["a pickle in pickle.loads"])
    assert is_found(found, CALL)
    inner = b"B" + struct.pack("<I", len(SYSTEM)) + SYSTEM
    torchs = b"\x80\x03" + call("torch.storage", "_load_from_bytes", inner) + b"."
    assert is_found(judged(tmp_path, torchs), CALL)
    twice = b"B" + struct.pack("<I", len(torchs)) + torchs
    assert is_found(judged(tmp_path, b"\x80\x03" + call("pickle", "loads", twice) + b"."), CALL)


def test_what_is_not_in_the_file_cannot_be_told_and_does_not_hide_the_rest(tmp_path):
    for what, data in {
        "a name that a call computes": text("os") + call("models", "Name", text("x")) + b"\x93",
        "a memo that was never filled": b"h\x07",
        "a number of the extension registry": b"\x82\x01",
        "a buffer beside the file": b"\x97",
    }.items():
        start = b"\x80\x04" + data + ARGUMENT
        assert judged(tmp_path, start + b".").verdict == "cannot tell", what
        assert is_found(judged(tmp_path, start + b"0" + SYSTEM[2:]), CALL), what


def test_what_ran_before_a_fault_is_said(tmp_path):
    for fault in (b"", b"\xff", b"0000.", b"X\xff\xff\xff\xff", b"t.", b"\x80\x09"):
        found = judged(tmp_path, SYSTEM[:-1] + b"0" + fault)
        assert is_found(found, CALL), fault
        assert found.streams[0].fault, fault
        assert judged(tmp_path, b"\x80\x02]" + fault).verdict == "cannot tell", fault


def test_what_pickle_takes_in_front_of_a_call(tmp_path):
    for first in (
        *(b"I0x10\n", b"L0x10L\n", b"I-007\n", b"L0x" + b"f" * 9000 + b"L\n"),
        *(b"}Nb", b"I1\n(N}tb", b"]NaI0\nNs", b"]Na(I0\nNu", b"N(e", b"N(u", b"N(\x90"),
    ):
        assert is_found(judged(tmp_path, first + b"0" + SYSTEM[2:]), CALL), first


def test_a_line_may_stand_across_the_end_of_what_is_read_at_once(tmp_path):
    before = b"N0" * ((1 << 19) - 5)
    assert is_found(judged(tmp_path, before + b"S'" + b"x" * 99 + b"'\n0" + SYSTEM[2:]), CALL)


def test_what_is_beyond_a_limit_is_no_pass(tmp_path):
    for first in (b"\x8b" + struct.pack("<i", 9000) + b"\1" * 9000, b"}(" + b"N" * 99 + b"tNs"):
        found = judged(tmp_path, first + b"0" + SYSTEM[2:])
        assert found.verdict == "cannot tell", first[:1]


def test_pickles_behind_the_first(tmp_path):
    for before in (b"\x80\x02N.", b"N.", pickle.dumps({"a": 1}, 4) * 3):
        found = judged(tmp_path, before + SYSTEM)
        assert is_found(found, CALL), before
        assert found.streams[0].offset == len(before)
        assert is_found(judged(tmp_path, before + SYSTEM[2:]), CALL), before  # of protocol 0


def test_a_pickle_in_the_place_of_a_storage(tmp_path):
    made = io.BytesIO()
    torch.save({"w": torch.ones(30)}, made, _use_new_zipfile_serialization=False)
    data = made.getvalue()[: -30 * 4 - 8]
    assert is_found(judged(tmp_path, data + SYSTEM + bytes(60)), CALL)


def test_names_mean_nothing(tmp_path):
    """CVE-2025-1889, CVE-2025-10155: a pickle under another ending."""
    for name in ("model.safetensors", "model.onnx", "README.md", "weights", "model.h5", "a.txt"):
        assert is_found(judged(tmp_path, SYSTEM, name), CALL), name


# Zips


def zipped(entries, method=zipfile.ZIP_STORED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return made.getvalue()


HONEST = {"archive/data.pkl": b"\x80\x02}.", "archive/version": b"3\n"}


def test_every_record_of_a_zip(tmp_path):
    for name in ("archive/other.pkl", "archive/data/7", "outside", "archive/x.txt"):
        for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2):
            data = zipped({**HONEST, name: SYSTEM}, method)
            assert is_found(judged(tmp_path, data), CALL), (name, method)


def edited(data, *edits):
    data = bytearray(data)
    for mark, offset, value in edits:
        position = data.rindex(mark) + offset
        data[position : position + len(value)] = value
    return bytes(data)


EVIL = zipped({**HONEST, "archive/evil.pkl": SYSTEM})
LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
ODD = {
    "another name in the local header (CVE-2025-1944)": edited(EVIL, (LOCAL, 30, b"archive/e")),
    "another name in the directory (CVE-2025-1944)": edited(EVIL, (CENTRAL, 46, b"archive/e")),
    "flag bits of encryption (CVE-2025-1945)": edited(
        EVIL, (LOCAL, 6, b"\x01\x00"), (CENTRAL, 8, b"\x01\x00")
    ),
    "flag bits of one header (CVE-2025-1945)": edited(EVIL, (CENTRAL, 8, b"\x41\x20")),
    "a wrong CRC (CVE-2025-10156)": edited(
        EVIL, (LOCAL, 14, b"\x01\x02\x03\x04"), (CENTRAL, 16, b"\x01\x02\x03\x04")
    ),
    "bytes before it": b"junk" * 10 + EVIL,
    "bytes behind it": EVIL + b"junk" * 10,
    "no directory": EVIL[: EVIL.index(CENTRAL)],
    "a directory of no entries": edited(EVIL, (END, 8, bytes(4)), (END, 12, bytes(4))),
    "a size of nothing": edited(EVIL, (CENTRAL, 20, b"\0" * 8)),
    "a record that the directory does not name": edited(
        EVIL, (END, 8, struct.pack("<HHI", 2, 2, EVIL.rindex(CENTRAL) - EVIL.index(CENTRAL)))
    ),
    "an odd disk": edited(EVIL, (CENTRAL, 34, b"\x07\x00")),
    "two of one name": zipped({**HONEST, "archive/DATA.pkl": SYSTEM}),
    "another archive in it": zipped({"a/b.zip": EVIL}),
    "another magic": b"XX" + EVIL[2:],
}  # fmt: skip


def test_tricks_of_zips(tmp_path):
    for trick, data in ODD.items():
        assert is_found(judged(tmp_path, data), CALL), trick


def test_a_pickle_that_another_names_as_a_storage(tmp_path):
    """torch takes the folder of the first record for the archive's."""
    pid = (
        b"("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + text("data.pkl")
        + text("cpu")
        + b"K\x01tQ"
    )
    entries = {
        "data/version": b"3\n",
        "b/data.pkl": b"\x80\x02" + pid + b".",
        "data/data.pkl": SYSTEM,
    }
    assert is_found(judged(tmp_path, zipped(entries)), CALL)
    other = {
        "version": b"3\n",
        "b/data.pkl": entries["b/data.pkl"].replace(b"data.pkl", b"evil.bin"),
        "c/data/evil.bin": SYSTEM,
    }
    assert is_found(judged(tmp_path, zipped(other)), CALL)


def test_what_is_encrypted_is_no_pass(tmp_path):
    locked = zipped({"data.pkl": bytes(range(7, 99))})
    locked = edited(locked, (LOCAL, 6, b"\x01\x00"), (CENTRAL, 8, b"\x01\x00"))
    found = judged(tmp_path, locked)
    assert found.verdict == "cannot tell"
    assert "encrypted" in found.streams[0].fault


# Other carriers


def tarred(entries):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in entries.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def header_of(data, offset, value, signed=False):
    """The tar with other bytes in its first header, and the sum that fits."""
    header = bytearray(data[:512])
    header[offset : offset + len(value)] = value
    header[148:156] = b" " * 8
    total = sum(byte - 256 * (signed and byte > 127) for byte in header)
    header[148:156] = b"%06o\0 " % total
    return bytes(header) + data[512:]


STORED = b"\x80\x02K\x02.\x80\x02(K\x01U\x03cpuctorch\nFloatStorage\nt." + struct.pack("<q", 2)
STORED += b"\x80\x02\xff.cos\n"
"""The beginning of the storages of such a tar: how many, one of them with its bytes."""


def array(payload, descr=b"'|O'"):
    header = b"{'descr': %s, 'fortran_order': False, 'shape': (1,), }\n" % descr
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + payload


def joblibs(dtype):
    """An array of joblib's whose objects are a pickle, harmless without a memo of its own."""
    recalled = b"00h\x00h\x01\x93"
    inner = text("os") + b"\x94" + text("system") + b"\x94" + recalled + ARGUMENT + b"."
    state = text("shape") + b"(K" + bytes([len(inner)]) + b"t" + text("dtype") + dtype
    start = b"\x80\x04" + text("collections") + b"\x94" + text("OrderedDict") + b"\x9400"
    start += b"cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81}("
    return start + state + b"ub" + inner + b"."


def dtype(code):
    return call("numpy", "dtype", text(code), b"\x89", b"\x88")


FIELDS = b"}" + text("a") + b"(" + dtype("O8") + b"K\x00ts"
RECORDS = dtype("V1") + b"(K\x03U\x01|NU\x01a\x85" + FIELDS + b"K\x08K\x01K\x1btb"
END_RECORD = b"PK\x05\x06" + bytes(18)
ZFILE = b"ZF" + hex(len(SYSTEM)).ljust(19).encode() + zlib.compress(SYSTEM)
CARRIERS = {
    "npy of objects, spelled out": array(SYSTEM[2:], b"'object'"),
    "npy of objects, escaped": array(SYSTEM[2:], b"'\\x4f'"),
    "npy of fields": array(SYSTEM[2:], b"[('a', 'object')]"),
    "npy before the end record of a zip": array(SYSTEM) + END_RECORD,
    "zlib before the end record of a zip": zlib.compress(SYSTEM) + END_RECORD,
    "joblib of 0.9": ZFILE,
    "joblib, objects spelled out": joblibs(dtype("object")),
    "joblib, objects in fields": joblibs(RECORDS),
    "tar": tarred({"model.ckpt": SYSTEM}),
    "a nemo's tar with a zip": tarred({"model_config.yaml": b"a: 1", "model_weights.ckpt": EVIL}),
    "torch's tar of 2017": tarred({"storages": STORED + SYSTEM, "pickle": b"N."}),
    "torch's tar of 2017, protocol 0": tarred({"storages": STORED + SYSTEM[2:], "pickle": b"N."}),
    "tar without a magic": header_of(tarred({"a": SYSTEM}), 257, bytes(8)),
    "tar with signed bytes in its sum": header_of(tarred({"a": SYSTEM}), 300, b"\xff", signed=True),
    "tar with a kind that nobody knows": header_of(tarred({"a": SYSTEM}), 156, b"Z"),
    "npy": array(SYSTEM),
    "npz": zipped({"a.npy": array(SYSTEM)}, zipfile.ZIP_DEFLATED),
    "gzip": gzip.compress(SYSTEM),
    "gzip, two members": gzip.compress(b"\x80\x02N.") + gzip.compress(SYSTEM),
    "gzip, zeros between members": gzip.compress(b"N0") + bytes(7000) + gzip.compress(SYSTEM),
    "gzip, no end": gzip.compress(SYSTEM + os.urandom(9000))[:-9],
    "gzip, a wrong sum": gzip.compress(SYSTEM + os.urandom(9000))[:-8] + bytes(8),
    "zlib, a fault behind the pickle": zlib.compress(SYSTEM + os.urandom(30000))[:20000]
    + b"!" * 99,
    "bzip2": bz2.compress(SYSTEM),
    "xz": lzma.compress(SYSTEM),
    "lzma": lzma.compress(SYSTEM, lzma.FORMAT_ALONE),
    "zlib": zlib.compress(SYSTEM),
    "gzip of a tar of a zip": gzip.compress(tarred({"a/b": EVIL})),
}


def test_carriers(tmp_path):
    for kind, data in CARRIERS.items():
        assert is_found(judged(tmp_path, data), CALL), kind


def test_what_is_not_followed_in_torchs_tar_is_no_pass(tmp_path):
    for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE):
        made = io.BytesIO(tarred({"x": STORED + SYSTEM}))
        with tarfile.open(fileobj=made, mode="a") as archive:
            link = tarfile.TarInfo("storages")
            link.type, link.linkname = kind, "x"
            archive.addfile(link)
        assert judged(tmp_path, made.getvalue()).verdict == "cannot tell", kind


def test_what_is_not_read_is_no_pass(tmp_path):
    for magic in (b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07", b"Salted__", b"\x28\xb5\x2f\xfd"):
        found = judged(tmp_path, magic + bytes(100))
        assert found.verdict == "cannot tell", magic
        assert "is not supported" in found.streams[0].fault, magic


def test_a_type_that_joblibs_bytes_do_not_have_is_no_pass(tmp_path):
    """Its metadata hold an object: joblib skips the bytes, where a pickle would hide the rest."""
    inner = b"N.C\xff"
    typed = dtype("u1") + b"(K\x04U\x01|NNNJ\xff\xff\xff\xffK\x01K\x00}U\x01ac__main__\nA\n)\x81stb"
    state = text("shape") + b"K\x04\x85" + text("dtype") + typed
    data = b"\x80\x04cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81}(" + state + b"ub" + inner
    found = judged(tmp_path, data + b"0" + call("os", "system", text(COMMAND)) + b"." + b"x" * 255)
    assert not found.ok()


def test_an_array_within_a_frame_is_no_pass(tmp_path):
    """joblib takes its bytes from behind the frame, and the opcodes behind it from within."""

    def array_of(count):
        state = text("shape") + b"K" + bytes([count]) + b"\x85" + text("dtype") + dtype("u1")
        return b"cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81}(" + state + b"ub"

    evil = b"0" + call("os", "system", text(COMMAND)) + b"0N."
    framed = array_of(len(evil)) + evil
    data = b"\x80\x04" + array_of(1) + b"\xff0\x95" + struct.pack("<Q", len(framed)) + framed
    assert not judged(tmp_path, data + b"N." + bytes(len(evil) - 2)).ok()


def test_a_frame_behind_the_end_of_a_pickle_is_no_pass(tmp_path):
    """torch goes on behind a frame of 128 KiB or more, and behind any in bytes."""
    framed = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + b"\xff" * (200 << 10)
    data = b"\x80\x04\x95" + struct.pack("<Q", len(framed)) + framed + SYSTEM
    assert not judged(tmp_path, data).ok()


def test_a_class_method_is_one_however_it_is_named(tmp_path):
    made = call("builtins", "getattr", b"cmodels\nNet\n", text("from_config")) + b"K\x01\x85R."
    named = stack_global("models", "Net.from_config") + b"K\x01\x85R."
    for data in (made, named):
        assert judged(tmp_path, b"\x80\x04" + data).verdict == "needs code"


def test_lambda_layers_of_keras_are_named(tmp_path):
    config = b'{"class_name": "Lambda", "config": {}}'
    for data in (config, zipped({"config.json": config, "model.weights.h5": b"\x89HDF"})):
        assert is_found(judged(tmp_path, data), "keras.layers.Lambda")


# What it may cost


def bombs():
    yield "many calls", b"\x80\x02cos\ngetpid\n" + b"2)R0" * 60_000 + b"."
    yield "many data", b"\x80\x02" + b"N0" * 60_000 + b"N."
    yield "nested", b"\x80\x02" + b"]" * 60_000 + b"a" * 59_999 + b"."
    deep = b"\x80\x02cm\nA\n" + b")\x81" * 60_000 + b"."
    yield "classes of classes", deep
    doubling = b"".join(b"q%c0(h%ch%ct" % (n, n, n) for n in range(100))
    yield "doubling", b"\x80\x02N" + doubling + b"0" + call("m", "A", b"h\x63") + b"."
    yield "doubling, called", b"\x80\x02cm\nA\n(N" + doubling + b"tR."
    yield "doubling, as arguments", b"\x80\x02cos\nsystem\n]N" + doubling + b"aR."
    yield "many states", b"\x80\x02cm\nA\n)\x81" + b"Nb" * 60_000 + b"."
    yield "many items of an object", b"\x80\x02cm\nA\n)\x81" + b"Na" * 60_000 + b"."
    partials = b"cfunctools\npartial\nq\x00" + b"h\x00" * 60_000 + b"cm\nf\n"
    yield "nested partials", b"\x80\x02cos\nsystem\n0" + partials + b"\x85R" * 60_000 + b"."
    many = b"(" + b"N" * 100_000 + b"tq\x010cos\nsystem\n0c%s\nq\x000" + b"h\x00h\x01R0" * 50_000
    yield "many arguments of many calls", b"\x80\x02" + many % b"m\nA" + b"N."
    shared = (
        b"](" + b"N" * 100_000 + b"eq\x010cos\nsystem\n0c%s\nq\x000" + b"h\x00h\x01\x85R0" * 50_000
    )
    yield "a list that many calls share", b"\x80\x02" + shared % b"builtins\nset" + b"N."
    yield "pairs that many calls share", b"\x80\x02" + shared % b"builtins\ndict" + b"N."
    state = b"0cuuid\nUUID\n)\x81h\x01b" * 50_000
    yield "a state that many share", b"\x80\x02(" + b"N" * 100_000 + b"tq\x01" + state + b"."
    chain = b"".join(b"h\x00(h\x01tRq\x01" for _ in range(60_000))
    yield "a chain of calls by the memo", b"\x80\x02cos\nsystem\n0cm\nA\nq\x00Nq\x01" + chain + b"."
    yield "many pickles", b"\x80\x02N." * 60_000
    many = b"C\x05\x80\x02N.0q\x00" + b"0cpickle\nloads\nq\x010" + b"h\x01h\x00\x85R0" * 60_000
    yield "one argument many times", b"\x80\x03" + many + b"N."
    yield "long text", b"\x80\x02" + call("os", "system", text("x" * 5_000_000)) + b"."
    yield (
        "memo bomb",
        b"\x80\x02N" + b"".join(b"r" + struct.pack("<I", n * 4099) for n in range(60_000)) + b".",
    )


@pytest.mark.parametrize(
    ("what", "data"), list(bombs()), ids=lambda one: one if isinstance(one, str) else ""
)
def test_bombs_have_an_answer(what, data, tmp_path):
    found = judged(tmp_path, data)
    assert len(texts(found)) <= 200
    assert all(len(one) < 20_000 for one in texts(found))


def test_inflation_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(scanning, "_MAX_INFLATED_BYTES", 1 << 20)
    for data in (
        gzip.compress(bytes(8 << 20)),
        bz2.compress(bytes(8 << 20)),
        lzma.compress(bytes(8 << 20)),
    ):
        found = judged(tmp_path, data)
        assert found.verdict == "cannot tell"
        assert "decompresses to more than" in found.streams[0].fault
