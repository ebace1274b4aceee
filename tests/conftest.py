"""Set before jax starts: 8 simulated CPU devices, programs compiled quickly, and caches shared by all processes, so that no noise is solved
twice and no process compiles what another has compiled."""

import collections
import functools
import gc
import hashlib
import io
import os
import secrets
import types
import typing
from pathlib import Path

# Compiling is most of what tests cost. Without LLVM's optimisations and the fusion emitters it takes a fifth; the passes that decide on
# memory and on what crosses between devices are the same.
QUICKLY = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_opt_preset=FAST_COMPILE",
)
CACHE = Path(__file__).resolve().parents[1] / "outputs" / "cache"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(("--xla_force_host_platform_device_count=8", *QUICKLY))
# As `dpx.processes.mesh.simulate_devices` does, and for its reason: 20 steps on eight devices hung in three of six trials on two busy
# cores.
os.environ["PJRT_NPROC"] = "32"
os.environ["DPX_CACHE"] = str(CACHE / "calibration")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# One program in thirty is the same as another test's: writing all of them costs several times what these save. Processes that tests start
# do the same again and again, and have the cache (`tests.processes.environment`).
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# Where in Python an operation of a compiled program comes from: nobody reads it, and ten frames are written down for each.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Leaving jax's own frames out of an exception compares the path of every frame with those of forty files; many tests expect exceptions.
os.environ["JAX_TRACEBACK_FILTERING"] = "off"

import beartype  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from jax._src import compiler  # noqa: E402

from tests import quickly as quickly  # noqa: E402

_jaxtyped = jaxtyping.jaxtyped


def _is_of_arrays(annotation: typing.Any) -> bool:
    """Whether jaxtyping has shapes to check in it; an annotation that is still a string may have."""
    if isinstance(annotation, str) or (getattr(annotation, "__module__", None) or "").startswith("jaxtyping"):
        return True
    if typing.get_origin(annotation) is typing.Literal:
        return False
    parts = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    return any(map(_is_of_arrays, parts))


def _checked(function, typechecker):
    annotations = getattr(function, "__annotations__", None)
    if isinstance(function, type) or annotations is None or any(map(_is_of_arrays, annotations.values())):
        return _jaxtyped(function, typechecker=typechecker)
    return _checked_again(function) if annotations else function


_made: dict[types.CodeType, typing.Any] = {}


def _checked_again(function):
    """beartype generates and compiles a wrapper for each function that it checks. Inner functions that are defined again in every call of
    the outer function, by the same code with the same annotations, share one wrapper, bound to each in turn; some need no wrapper."""
    made = _made.get(function.__code__)
    if made is None or made.__annotations__ != function.__annotations__:
        _made[function.__code__] = made = beartype.beartype(function)
        return made
    if "__beartype_func" not in (made.__kwdefaults__ or {}):
        return function
    again = types.FunctionType(made.__code__, made.__globals__)
    again.__kwdefaults__ = made.__kwdefaults__ | {"__beartype_func": function}
    return functools.update_wrapper(again, function)


# What the import hook of `--jaxtyping-packages` decorates every function of the package with. Without annotations there is nothing to
# check, and without arrays among them no more than beartype does; jaxtyping would compile two functions for each, also for inner
# functions that are defined again in every call of the outer function.
jaxtyping.jaxtyped = lambda typechecker: functools.partial(_checked, typechecker=typechecker)


_compile = compiler.backend_compile_and_load
# By what they are compiled from, the least recently used first.
_programs: collections.OrderedDict[tuple[typing.Any, ...], typing.Any] = collections.OrderedDict()


def _compiled_once(backend, module, devices, options, callbacks):
    """A fifth of what runs of tests compile was compiled before: the initial parameters of a model, say."""
    if callbacks:
        return _compile(backend, module, devices, options, callbacks)
    module.operation.write_bytecode(text := io.BytesIO())
    key = (hashlib.sha256(text.getvalue()).digest(), options.SerializeAsString(), tuple(device.id for device in devices), id(backend))
    if key not in _programs:
        _programs[key] = _compile(backend, module, devices, options, callbacks)
    _programs.move_to_end(key)
    if len(_programs) > 200:
        _programs.popitem(last=False)
    return _programs[key]


compiler.backend_compile_and_load = _compiled_once


@functools.cache
def _statement_schema():
    import json

    import jsonschema

    import dpx

    schema = json.loads((Path(dpx.__file__).parent / "docs" / "schemas" / "privacy.schema.json").read_text())
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(autouse=True, scope="module")
def repeatable_root_secrets(tmp_path_factory):
    """The root secret of a run in a temporary folder follows from the folder's place, so that no test passes or fails by chance.

    A folder that draws again draws another secret, and so does every other folder. Runs in other processes draw as users' runs do.
    """
    from dpx import randomness

    base, create = tmp_path_factory.getbasetemp().resolve(), randomness.RootSecret.create.__func__
    drawn: collections.Counter[str] = collections.Counter()
    of_the_system = secrets.token_bytes

    def repeatable(cls, path):
        place = Path(path).resolve()
        if not place.is_relative_to(base) or secrets.token_bytes is not of_the_system:
            return create(cls, path)
        # pytest numbers folders of one name in the order in which a worker makes them.
        folder, *inside = place.relative_to(base).parts
        name = "/".join((folder.rstrip("0123456789"), *inside))
        drawn[name] += 1
        secret = hashlib.sha256(f"{name}:{drawn[name]}".encode()).digest()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(randomness.secrets, "token_bytes", lambda count: secret[:count])
            return create(cls, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomness.RootSecret, "create", classmethod(repeatable))
        yield


@pytest.fixture(autouse=True)
def statements_fit_their_schema(monkeypatch):
    """Every statement that a test writes or reads validates against the schema that ships."""
    from dpx.files.records import to_json
    from dpx.statement import seals

    require_sound = seals.require_sound

    def fitting(statement, *source):
        require_sound(statement, *source)
        _statement_schema().validate(to_json(statement))

    monkeypatch.setattr(seals, "require_sound", fitting)


def pytest_collection_finish():
    """What is imported by now stays until the end, and what tracing makes is mostly freed by its last reference: rarer collections take
    4 to 11 % off tests that trace (experiments/LOG.md)."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
