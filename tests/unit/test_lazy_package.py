"""`import fedensemble` imports nothing heavy; its public names are there all the same."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

import fedensemble as fe
from fedensemble import public
from fedensemble._lazy_package import SHARED_NAMES, LazyPackage


def run_python(program: str, *options: str) -> str:
    done = subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_does_not_import_torch():
    run_python(
        "import sys, fedensemble as fe\n"
        "assert fe.__version__ and 'torch' not in sys.modules\n"
        "fe.FedAvg\n"
        "assert 'torch' in sys.modules, 'or this test could not fail'"
    )


def test_public_names():
    assert set(fe.__all__) == set(public.__all__) and len(set(fe.__all__)) == len(fe.__all__)
    assert set(fe.__all__) <= set(dir(fe))
    for name in fe.__all__:
        assert getattr(fe, name) is getattr(public, name)
    names: dict[str, object] = {}
    exec("from fedensemble import *", names)
    assert names["FedAvg"] is fe.FedAvg and names["algorithms"] is fe.algorithms
    assert fe.data.FederatedData is fe.FederatedData, "subpackages are attributes as well"


def test_public_names_that_subpackages_have_are_listed():
    """Importing such a subpackage would otherwise hide the public name."""
    shared = {name for name in fe.__all__ if find_spec(f"fedensemble.{name}")}
    assert shared == set(SHARED_NAMES)


def test_a_shared_name_is_never_the_subpackage():
    program = "import fedensemble.config.build\n"
    for name in SHARED_NAMES:
        program += f"import fedensemble.{name}\nfrom fedensemble.{name} import *\n"
    program += "import fedensemble as fe\n"
    for name in SHARED_NAMES:
        program += f"from fedensemble import {name}\nassert {name} is fe.{name}\n"
        program += f"assert type({name}).__name__ != 'module'\n"
    run_python(program, "-W", "error::ImportWarning")


def test_missing_names():
    with pytest.raises(AttributeError, match="module 'fedensemble' has no attribute 'FedAvgg'"):
        fe.FedAvgg
    with pytest.raises(AttributeError, match="_hidden"):
        fe._hidden
    with pytest.raises(ImportError, match="cannot import name 'FedAvgg'"):
        from fedensemble import FedAvgg  # noqa: F401


def test_a_submodule_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import surely_not_installed\n")
    package = LazyPackage("lazy_test_package")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "lazy_test_package", package)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        package.broken
