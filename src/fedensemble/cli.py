"""The command line: thin verbs over the library."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import click
import typer
import typer.core
from rich.console import Console

from .errors import DivergedError, FedEnsembleError
from .version import VERSION

typer.core.HAS_RICH = False  # it would put a backslash before each [default], as rich's markup needs
DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Federated ensembles: K models trained at the price of one.")  # fmt: skip
data_app = typer.Typer(no_args_is_help=True, help="Get data sets, and look at how they are divided among clients.")
app.add_typer(data_app, name="data")
console = Console(soft_wrap=True)

File = Annotated[Path | None, typer.Argument(help="A TOML config; without one, the default on real digits.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: --set ensemble.modes=3.")]
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
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default runs/<name>/<config-hash>.")] = None,
    device: Device = None,
    runs: Root = RUNS,
    checkpoint_seconds: Annotated[float, typer.Option(help="Least time between two checkpoints.", min=0)] = 10.0,
    rank_timeout: Annotated[float, typer.Option(help="Under torchrun: seconds a rank may be silent.", min=1)] = 1800.0,
    profile: Annotated[bool, typer.Option("--profile", help="Show where a round's time goes.")] = False,
) -> None:
    """Train an ensemble; the same command again continues an interrupted run, and returns a finished one at once."""
    from .engines.job import job
    from .experiment.compare import run_folder
    from .experiment.follow import follow
    from .experiment.profile import profiling
    from .experiment.run import run
    from .report.page import write_page
    from .report.profile import profile_tables
    from .report.progress import Live
    from .report.run import write_report

    with job(rank_timeout) as ranks:
        config, _ = ranks.together(lambda: load_config(file, set_, device))
        folder = out or run_folder(config, runs)
        if ranks.rank:
            return follow(config, ranks)
        with profiling() if profile else nullcontext() as timed, Live(console) as live:
            watcher = live.watcher(config.name)
            summary = run(config, folder, watcher, checkpoint_seconds=checkpoint_seconds, ranks=ranks)
    for table in profile_tables(timed.write(folder)) if timed is not None and timed.rounds else ():
        print_table(table)
    print_table(write_report(folder, summary))
    console.print(f"Run: {folder}\nReport: {write_page(folder)}", highlight=False)


@app.command("compare")
def compare_command(
    file: Annotated[Path | None, typer.Argument(help="A comparison or config file; without one, the default.")] = None,
    set_: Sets = None,
    algorithms: Annotated[str | None, typer.Option(help="Rows: algorithms, separated by commas.")] = None,
    modes: Annotated[str | None, typer.Option(help="Rows: numbers of modes K, separated by commas.")] = None,
    schedules: Annotated[str | None, typer.Option(help="Rows: schedules, separated by commas.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas.")] = None,
    device: Device = None,
    runs: Root = RUNS,
) -> None:
    """Train several algorithms, schedules or numbers of modes on the same data and seeds: one table, one plot."""
    from .engines.job import refuse_ranks
    from .experiment.compare import compare
    from .report.comparison import find_comparison, write_comparison
    from .report.page import write_page
    from .report.progress import Live

    refuse_ranks("compare")
    settings = [*(set_ or []), *([f"engine.device={device}"] if device else [])]
    wanted = find_comparison(file, settings, algorithms, modes, schedules, seeds)
    with Live(console, runs=len(wanted.rows) * len(wanted.seeds)) as live:
        results = compare(wanted, runs, lambda label, seed: live.watcher(f"{label}, seed {seed}"), live.finished)
    folder = wanted.folder(runs)
    print_table(write_comparison(folder, wanted, results))
    for run in (run for result in results for run in result.folders):
        write_page(run)  # the comparison's page links to them
    console.print(f"Picture: {folder / 'curves.png'}\nReport: {write_page(folder)}", highlight=False)


@app.command("reproduce")
def reproduce_command(
    names: Annotated[list[str] | None, typer.Argument(help="table1, table2-mnist, ..., a file, or all.")] = None,
    scale: Annotated[str, typer.Option(help="smoke (made-up data; minutes for all) or full (one GPU).")] = "full",
    only: Annotated[list[str] | None, typer.Option(help="Only cells with this in their row or column.")] = None,
    set_: Sets = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas.")] = None,
    device: Device = None,
    runs: Root = RUNS,
    out: Annotated[Path, typer.Option(help="Where tables and figures go.")] = Path("reproduced"),
    collect: Annotated[Path | None, typer.Option(help="Then put all tables so far into this Markdown page.")] = None,
) -> None:
    """Train the paper's tables and figures and put our numbers beside the paper's; what is finished is not repeated."""
    from .errors import InputError
    from .experiment.reproduce import NAMES
    from .report.comparison import int_
    from .report.comparison import names as parts
    from .report.reproduce_command import reproduce_names
    from .report.reproduction import collect as collect_tables

    if not names and collect is None:
        raise InputError(f"Say which table or figure: {', '.join(NAMES)}, or all.")
    settings = [*(set_ or []), *([f"engine.device={device}"] if device else [])]
    chosen = [int_(seed, "--seeds") for seed in parts(seeds)] if seeds else None
    for table, _ in reproduce_names(names or [], scale, settings, chosen, only or [], runs, out, console):
        print_table(table)
    if collect is not None:
        found = collect_tables(out / scale, collect)
        console.print(f"{collect}: {', '.join(found)}", highlight=False)


@app.command("predict")
def predict_command(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    inputs: Annotated[Path, typer.Argument(help="An .npz file: inputs x, or one array; units as in training.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz file to write.")],
    members: Annotated[bool, typer.Option(help="Write every mode's prediction, too.")] = False,
    device: Device = None,
) -> None:
    """Predict with a finished run: mean, label, entropy and mutual information (mean and variance for regression)."""
    from .report.predictions import predict_file

    count = predict_file(run, inputs, output, members=members, device=device or "auto")
    console.print(f"{count} predictions written to {output}", highlight=False)


@app.command("report")
def report_command(
    path: Annotated[Path, typer.Argument(help="The folder of a run, finished or not, or of a comparison.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; by default report.html in the folder.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write the report of a run or a comparison as one HTML page, and print its table."""
    from .report.page import write_all

    table, page = write_all(path, out)
    print_table(table)
    console.print(f"Report: {page}", highlight=False)
    if open_:
        typer.launch(page.resolve().as_uri())


@app.command("deploy")
def deploy_command(
    file: File = None,
    set_: Sets = None,
    out: Annotated[Path, typer.Option(help="The folder to write; it must be new.")] = Path("fleet"),
) -> None:
    """Write a Flower app that trains a config on real clients; running it needs the extra "flower"."""
    from .deploy.write import write_app

    for line in write_app(load_config(file, set_, None), out):
        console.print(line, highlight=False)


@app.command("show")
def show_command(file: File = None, set_: Sets = None) -> None:
    """Print a config with its defaults filled in."""
    typer.echo(load_config(file, set_, None).toml(empty=False), nl=False)


@app.command("ls")
def list_command(
    what: Annotated[
        str,
        typer.Argument(
            help="algorithms, datasets, engines, models, optimizers, participations, partitions, schedules or runs."
        ),
    ],
    name: Annotated[str | None, typer.Argument(help="One of them, with each of its options.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    runs: Root = RUNS,
) -> None:
    """List what there is, with options and their defaults."""
    import json as encoder

    from .report.listing import listing, listing_table, option_table

    found = listing(what, runs, name)
    if json:
        typer.echo(encoder.dumps(found, indent=2))
    elif name is not None:
        print_table(option_table(what, found[0]))
    elif found:
        print_table(listing_table(what, found))
    else:
        console.print(f"No {what} yet." if what == "runs" else f"No {what}.", highlight=False)


@app.command("bench")
def bench_command(
    name: Annotated[str | None, typer.Argument(help="engines or growth; without a name, both.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="To spend on each way of doing a thing.", min=0)] = 2.0,
    full: Annotated[bool, typer.Option("--full", help="All cases in full size, which is for a GPU.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder to write the tables to as JSON.")] = None,
) -> None:
    """Measure this machine: batched visits against a loop, and how time and memory grow; under a minute on a CPU."""
    from .bench.quick import bench
    from .fitting import find_device

    bench(name, str(find_device(device)), seconds, full, out, typer.echo)


@data_app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100 or shakespeare.")],
    root: Annotated[Path | None, typer.Option(help="Data folder; by default $FEDENSEMBLE_DATA or a cache.")] = None,
) -> None:
    """Download a data set and check it."""
    from .data import get

    for path in get(name, root):
        console.print(str(path), highlight=False)


@data_app.command("show")
def show_data_command(
    file: File = None,
    set_: Sets = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Draw who holds which classes, as PNG.")] = None,
) -> None:
    """Print the clients' sizes and a label histogram; with -o also draw who holds which classes."""
    from .experiment.build import build_data
    from .report.data import write_data_report

    tables, said = write_data_report(build_data(load_config(file, set_, None)), output)
    for table in tables:
        print_table(table)
    if said:
        console.print(said, highlight=False)


def load_config(file: Path | None, settings: list[str] | None, device: str | None):  # type: ignore[no-untyped-def]
    """The config of a command line."""
    from .experiment.build import resolve_device
    from .experiment.config import resolve
    from .experiment.files import default_file, read_toml, with_settings

    values = read_toml(file or default_file("digits.toml"))
    changes = [*(settings or []), *([f"engine.device={device}"] if device else [])]
    sets = "".join(f" --set {text}" for text in settings or ())
    where = f"{file or 'the default config'}{' with' if sets else ''}{sets}"
    return resolve_device(resolve(with_settings(values, changes), where))


def print_table(table) -> None:  # type: ignore[no-untyped-def]
    """A table for the terminal; plain Markdown elsewhere."""
    if not console.is_terminal:
        typer.echo(f"\n{table.title}\n\n{table.markdown()}")
        return
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(title=escape(table.title), title_justify="left")
    for column, name in enumerate(table.header):
        drawn.add_column(escape(name), justify="right" if table.numeric(column) else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(escape, row))
    console.print(drawn, soft_wrap=False)


def main() -> None:
    """Runs the command line; errors a user can cause are one message, without a traceback."""
    sys.exit(_guarded())


def _guarded() -> int:
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer turns an interrupt into this
            raise KeyboardInterrupt
        return code if isinstance(code, int) else DONE
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return BAD_INPUT
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted; run the same command again to continue.")
        return INTERRUPTED
    except DivergedError as error:
        _complain(f"error: {error}")
        return FAILED
    except FedEnsembleError as error:
        _complain(f"error: {error}")
        return BAD_INPUT
    except BrokenPipeError:  # the reader went away, as in `fedensemble ls runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except MemoryError:
        _complain("error: out of memory. Lower training.batch_size or engine.options.block.")
        return FAILED


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
