"""Imports go one way: ground <- modeling, data <- core <- plug-ins <- federation <- config <-
experiment <- cli.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedensemble

ROOT = Path(fedensemble.__file__).parent
GROUND = {
    "errors",
    "registry",
    "prng",
    "flat_params",
    "arguments",
    "version",
    "runtime",
    "durable",
    "redact",
    "text",
    "display",
    "renamed",
}
MODEL = {"modeling"} | GROUND
DATA = {"data"} | GROUND
CORE = {"core"} | MODEL
METHOD = CORE | DATA
ALLOWED = {
    "_import_interrupt": set(),
    "_lazy_package": set(),
    **dict.fromkeys(GROUND, GROUND),
    "checkpoint_file": GROUND,
    "data": DATA,
    "models": {"models"} | GROUND,
    "modeling": MODEL,
    "core": CORE,
    "algorithms": {"algorithms"} | CORE,
    "schedules": {"schedules"} | CORE,
    "participation": {"participation"} | CORE,
    "robust": {"robust"} | CORE,
    "averages": {"averages"} | CORE,
    "engines": {"engines"} | METHOD,
    "engines/flower": {"engines", "checkpoint_file", "participation"} | METHOD,
    "uncertainty": DATA | {"uncertainty"},
    "prediction": METHOD | {"uncertainty"},
    "predict": METHOD | {"prediction", "uncertainty", "engines"},
    "metrics": METHOD | {"prediction", "uncertainty"},
    "client_metrics": METHOD | {"metrics", "prediction", "uncertainty"},
    "tracking": GROUND | {"tracking", "checkpoint_file"},
}
# Ensemble.export imports it when it is called; at import time, export imports predict.
ALLOWED["predict"] |= {"export", "distillation"}
ALLOWED["export"] = ALLOWED["predict"] - {"distillation"} | {"predict", "metrics"}
ALLOWED["distillation"] = ALLOWED["predict"] | {"predict"}
METHODS = METHOD | {name for name in ALLOWED if "/" not in name}
ALLOWED["federation"] = METHODS | {"federation"}
FEDERATION = ALLOWED["federation"]
ALLOWED["testing"] = FEDERATION | {"testing"}
ALLOWED["estimators"] = FEDERATION | {"estimators"}
ALLOWED["bench"] = FEDERATION | {"bench"}
ALLOWED["personal"] = FEDERATION | {"personal"}
ALLOWED["config"] = FEDERATION | {"config", "personal"}
ALLOWED["experiment"] = ALLOWED["config"] | {"experiment"}
# Federation.save and load write and read run folders; see the docstring of that module.
ALLOWED["federation/run_files"] = ALLOWED["experiment"]
ALLOWED["deploy"] = ALLOWED["experiment"] | {"deploy"}
ALLOWED["theory"] = FEDERATION | {"theory"}
ALLOWED["report"] = ALLOWED["experiment"] | {"theory", "report"}
# report() and the estimators are imported when they are used
ALLOWED["public"] = ALLOWED["report"] | {"estimators"}
ALLOWED["catalog"] = ALLOWED["report"] | {"catalog"}
ALLOWED["scaffold"] = GROUND | {"scaffold"}
ALLOWED["cli"] = ALLOWED["catalog"] | {"bench", "deploy", "scaffold", "cli"}
ALLOWED["__main__"] = {"cli"}
LIGHT = {
    "modeling": {"torch"},
    "core": {"torch", "numpy"},
    "algorithms": {"torch", "scipy", "sklearn"},
    "schedules": {"torch", "numpy"},
    "participation": {"torch"},
    "robust": {"torch"},
    "averages": {"torch"},
    "engines": {"torch", "triton"},  # triton in kernels/triton only
    "engines/flower": {"torch", "numpy", "flwr"},
    "prng": {"torch", "numpy"},
}


def imports(path):
    """Module names a file imports: absolute, with the package's own as 'fedensemble.x.y'."""
    package = ("fedensemble", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            if module == "fedensemble":  # from .. import draws
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_direction(path):
    parts = path.relative_to(ROOT).parts
    room = "/".join(parts[:2]).removesuffix(".py")  # a part with a rule of its own
    room = room if room in ALLOWED else parts[0].removesuffix(".py")
    assert room in ALLOWED, f"say in this test what {room} may import"
    for name in imports(path):
        if name.startswith("fedensemble."):
            other = name.split(".")[1]
            assert other in ALLOWED[room], f"{path.relative_to(ROOT)} imports {name}"
        elif room in LIGHT:
            outside = name.split(".")[0]
            assert outside in sys.stdlib_module_names | LIGHT[room], (
                f"{path.relative_to(ROOT)} imports {name}"
            )


def test_federation_imports_experiment_when_it_is_used():
    """At import time, experiment imports federation; the other way round is a cycle."""
    tree = ast.parse((ROOT / "federation" / "run_files.py").read_text())
    at_top = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    inside = [
        node.module
        for function in tree.body
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom)
    ]
    assert not [name for name in at_top if name and name.startswith("experiment")]
    assert inside == ["experiment.saved_federation", "experiment.loaded_federation"]


def test_predict_imports_export_when_it_is_used():
    """At import time, export imports predict; `from .export` at the top would be a cycle."""
    at_top = {
        node.module
        for node in ast.parse((ROOT / "predict.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
    }
    assert not {name for name in at_top if name and name.startswith("export")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_kernels_import_triton(path):
    """And nobody imports kernels before it knows that there is a GPU: only inside functions."""
    text = path.read_text()
    if path.parent.name == "triton" or "triton" not in text:  # parsing all of them takes seconds
        return
    assert not {name for name in imports(path) if name.split(".")[0] == "triton"}
    tree = ast.parse(text)
    inside = [n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)]
    allowed = {n.lineno for n in inside if isinstance(n, ast.ImportFrom)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "triton" in (node.module or "").split("."):
            assert node.lineno in allowed, (
                f"{path.name}, line {node.lineno}: import it where it is used"
            )


def test_without_triton_both_engines_train_and_nothing_asks_for_it():
    code = (
        "import sys; sys.modules['triton'] = None  # as if it were not installed\n"
        "from fedensemble.algorithms import FedAvg\n"
        "from fedensemble.engines.stacked import aligned_rows\n"
        "from fedensemble.testing.toy_problems import small_federation, train\n"
        "assert not aligned_rows.HAS_TRITON\n"
        "for engine in ('loop', 'vector'): train(small_federation(FedAvg(), engine, 2, 2), 1)\n"
        "assert not [name for name in sys.modules if name.startswith('fedensemble.engines.kernels.triton.')]\n"
        "assert 'torch._dynamo' not in sys.modules, 'it takes a second'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT.parent)},
    )
    assert done.returncode == 0, done.stderr


def test_the_parser_sees_imports():
    assert "fedensemble.core.problem" in set(imports(ROOT / "algorithms" / "fedavg.py"))
    assert "fedensemble.prng" in set(imports(ROOT / "modeling" / "functional_model.py"))
    assert "torch.func" in set(imports(ROOT / "modeling" / "functional_model.py"))


def test_importing_the_package_draws_no_random_numbers_and_is_not_heavy():
    code = (
        "import sys, torch; before = torch.get_rng_state(); import fedensemble; "
        "assert torch.equal(before, torch.get_rng_state()); "
        "heavy = {'matplotlib', 'torchmetrics', 'sklearn', 'typer', 'pandas', 'flwr'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT.parent)},
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_changes_nothing_in_the_process():
    """Neither the garbage collector, nor torch's settings, nor its threads."""
    code = (
        "import gc, torch; "
        "look = lambda: (gc.isenabled(), gc.get_freeze_count(), torch.get_num_threads(), "
        "torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()); "
        "before = look(); import fedensemble as fe; assert look() == before; "
        "from fedensemble.testing.toy_problems import small_federation; "
        "small_federation(fe.FedAvg(), 'vector', 2, 2); assert look() == before, look()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT.parent)},
    )
    assert done.returncode == 0, done.stderr
