"""The command line: thin verbs over the library."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated

import typer
import typer.core

from ..version import VERSION
from .console import print_line, print_table
from .exit_codes import guarded
from .fleet import fleet_app

# it would put a backslash before each [default], as rich's markup needs
typer.core.HAS_RICH = False

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Federated ensembles: K models trained at the price of one.",
)
data_app = typer.Typer(
    no_args_is_help=True, help="Get data sets, and look at how they are divided among clients."
)
app.add_typer(data_app, name="data")
app.add_typer(fleet_app, name="fleet")

File = Annotated[
    Path | None, typer.Argument(help="A TOML config; without one, the default on real digits.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting: --set ensemble.modes=3.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or auto.")]
Root = Annotated[Path, typer.Option("--runs", help="Where runs are kept.")]
RUNS = Path("runs")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Federated ensembles: K models trained at the price of one."""


@app.command("run")
def run_command(
    file: File = None,
    set_: Sets = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/<name>/<config-hash>.")
    ] = None,
    device: Device = None,
    runs: Root = RUNS,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Least time between two checkpoints.", min=0)
    ] = 10.0,
    rank_timeout: Annotated[
        float, typer.Option(help="Under torchrun: seconds a rank may be silent.", min=1)
    ] = 1800.0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where a round's time goes.")
    ] = False,
) -> None:
    """Train an ensemble; the same command again continues an interrupted run, and returns a
    finished one at once.
    """
    from .run import run_config

    run_config(
        file,
        set_,
        device,
        out,
        runs,
        checkpoint_seconds=checkpoint_seconds,
        rank_timeout=rank_timeout,
        profile=profile,
    )


@app.command("compare")
def compare_command(
    file: Annotated[
        Path | None, typer.Argument(help="A comparison or config file; without one, the default.")
    ] = None,
    set_: Sets = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Rows: algorithms, separated by commas.")
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(help="Rows: numbers of modes K, separated by commas; K = 1 has one stratum."),
    ] = None,
    schedules: Annotated[
        str | None, typer.Option(help="Rows: schedules, separated by commas.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas.")] = None,
    device: Device = None,
    runs: Root = RUNS,
) -> None:
    """Train several algorithms, schedules or numbers of modes on the same data and seeds: one
    table, one plot.
    """
    from .compare import compare_rows
    from .config import all_settings

    compare_rows(file, all_settings(set_, device), algorithms, modes, schedules, seeds, runs)


@app.command("reproduce")
def reproduce_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="table1, table2-mnist, ..., a file, or all.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (made-up data; minutes for all) or full (one GPU).")
    ] = "full",
    only: Annotated[
        list[str] | None, typer.Option(help="Only cells with this in their row or column.")
    ] = None,
    set_: Sets = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas.")] = None,
    device: Device = None,
    runs: Root = RUNS,
    out: Annotated[Path, typer.Option(help="Where tables and figures go.")] = Path("reproduced"),
    collect: Annotated[
        Path | None, typer.Option(help="Then put all tables so far into this Markdown page.")
    ] = None,
) -> None:
    """Train the paper's tables and figures and put our numbers beside the paper's; what is finished
    is not repeated.
    """
    from .reproduce import reproduce_names

    reproduce_names(names or [], scale, set_ or [], seeds, device, only or [], runs, out, collect)


@app.command("predict")
def predict_command(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    inputs: Annotated[
        Path, typer.Argument(help="An .npz file: inputs x, or one array; units as in training.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz file to write.")],
    members: Annotated[
        bool, typer.Option(help="Write every model's prediction, too, and its mode.")
    ] = False,
    device: Device = None,
) -> None:
    """Predict with a finished run: mean, label, entropy and mutual information (mean and variance
    for regression).
    """
    from .predict import predict_file

    count = predict_file(run, inputs, output, members=members, device=device or "auto")
    print_line(f"{count} predictions written to {output}")


@app.command("report")
def report_command(
    path: Annotated[
        Path, typer.Argument(help="The folder of a run, finished or not, or of a comparison.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page to write; by default report.html in the folder.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write the report of a run or a comparison as one HTML page, and print its table."""
    from .report import write_and_warn

    table, page = write_and_warn(path, out)
    print_table(table)
    print_line(f"Report: {page}")
    if open_:
        typer.launch(page.resolve().as_uri())


@app.command("deploy")
def deploy_command(
    file: File = None,
    set_: Sets = None,
    out: Annotated[Path, typer.Option(help="The folder to write; it must be new.")] = Path("fleet"),
) -> None:
    """Write a Flower app that trains a config on real clients; running it needs the extra
    "flower".
    """
    from ..deploy.generate import write_app
    from .config import load_config

    for line in write_app(load_config(file, set_), out):
        print_line(line)


@app.command("show")
def show_command(file: File = None, set_: Sets = None) -> None:
    """Print a config with its defaults filled in."""
    from .config import read_config

    typer.echo(read_config(file, set_).toml(empty=False), nl=False)


@app.command("ls")
def list_command(
    what: Annotated[
        str,
        typer.Argument(
            help="aggregators, algorithms, attacks, datasets, engines, models, optimizers, participations, partitions, "
            "schedules or runs."
        ),
    ],
    name: Annotated[
        str | None, typer.Argument(help="One of them, with each of its options.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    runs: Root = RUNS,
) -> None:
    """List what there is, with options and their defaults."""
    from .ls import print_listing

    print_listing(what, name, runs, json)


@app.command("bench")
def bench_command(
    name: Annotated[
        str | None, typer.Argument(help="engines or growth; without a name, both.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    seconds: Annotated[
        float, typer.Option(help="To spend on each way of doing a thing.", min=0)
    ] = 2.0,
    full: Annotated[
        bool, typer.Option("--full", help="All cases in full size, which is for a GPU.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="A folder to write the tables to as JSON.")
    ] = None,
) -> None:
    """Measure this machine: batched visits against a loop, and how time and memory grow; under a
    minute on a CPU.
    """
    from ..bench.cli import bench
    from ..federation.resolve import find_device

    bench(name, str(find_device(device)), seconds, full, out, typer.echo)


@data_app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100 or shakespeare.")],
    root: Annotated[
        Path | None, typer.Option(help="Data folder; by default $FEDENSEMBLE_DATA or a cache.")
    ] = None,
) -> None:
    """Download a data set and check it."""
    from ..data import get

    for path in get(name, root):
        print_line(path)


@data_app.command("show")
def show_data_command(
    file: File = None,
    set_: Sets = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Draw who holds which classes, as PNG.")
    ] = None,
) -> None:
    """Print the clients' sizes and a label histogram; with -o also draw who holds which classes."""
    from ..config.build import build_data
    from ..report.data_report import write_data_report
    from .config import load_config

    tables, said = write_data_report(build_data(load_config(file, set_)), output)
    for table in tables:
        print_table(table)
    if said:
        print_line(said)


def main() -> None:
    """Runs the command line; errors a user can cause are one message, without a traceback.

    The process belongs to this command, so it may be tuned, which a library must not do. Objects
    that were imported are never garbage: excluding them from garbage collection saves half a second
    per command, part of it when Python exits. For the allocator see `keep_freed_memory`.
    """
    from ..runtime.malloc import keep_freed_memory

    gc.freeze()
    keep_freed_memory()
    code = guarded(app)
    gc.freeze()
    sys.exit(code)
