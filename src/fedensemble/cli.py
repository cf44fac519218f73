"""The command line: thin verbs over the library."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.console import Console

from .errors import DivergedError, FedEnsembleError
from .version import VERSION

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
) -> None:
    """Train an ensemble; the same command again continues an interrupted run, and returns a finished one at once."""
    from .experiment.compare import run_folder
    from .experiment.run import run
    from .report.progress import Live
    from .report.run import write_report

    config = load_config(file, set_, device)
    folder = out or run_folder(config, runs)
    with Live(console) as live:
        summary = run(config, folder, live.watcher(config.name), checkpoint_seconds=checkpoint_seconds)
    print_table(write_report(folder, summary))
    console.print(f"Run: {folder}\nReport: {folder / 'report.md'}, {folder / 'curves.png'}", highlight=False)


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
    from .experiment.compare import compare
    from .report.comparison import find_comparison, write_comparison
    from .report.progress import Live

    settings = [*(set_ or []), *([f"engine.device={device}"] if device else [])]
    wanted = find_comparison(file, settings, algorithms, modes, schedules, seeds)
    with Live(console, runs=len(wanted.rows) * len(wanted.seeds)) as live:
        results = compare(wanted, runs, lambda label, seed: live.watcher(f"{label}, seed {seed}"), live.finished)
    folder = wanted.folder(runs)
    print_table(write_comparison(folder, wanted, results))
    console.print(f"Report: {folder / 'report.md'}, {folder / 'curves.png'}", highlight=False)


@app.command("predict")
def predict_command(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    inputs: Annotated[Path, typer.Argument(help="An .npz file with inputs x, in the training data's units.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz file to write.")],
    members: Annotated[bool, typer.Option(help="Write every mode's prediction, too.")] = False,
    device: Device = None,
) -> None:
    """Predict with a finished run: mean, label, entropy and mutual information (mean and variance for regression)."""
    from .report.predictions import predict_file

    count = predict_file(run, inputs, output, members=members, device=device or "auto")
    console.print(f"{count} predictions written to {output}", highlight=False)


@app.command("report")
def report_command(run: Annotated[Path, typer.Argument(help="The folder of a run; it need not be finished.")]) -> None:
    """Draw a run's curves and write its table."""
    from .report.run import write_report

    print_table(write_report(run))
    console.print(f"Report: {run / 'report.md'}, {run / 'curves.png'}", highlight=False)


@app.command("show")
def show_command(file: File = None, set_: Sets = None) -> None:
    """Print a config with every default filled in."""
    typer.echo(load_config(file, set_, None).toml(), nl=False)


@app.command("ls")
def list_command(
    what: Annotated[str, typer.Argument(help="algorithms, datasets, engines, models, partitions, schedules or runs.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    runs: Root = RUNS,
) -> None:
    """List what there is."""
    import json as encoder

    from .report.listing import listing, listing_table

    found = listing(what, runs)
    if json:
        typer.echo(encoder.dumps(found, indent=2))
    elif found:
        print_table(listing_table(what, found))
    else:
        console.print(f"No {what} yet." if what == "runs" else f"No {what}.", highlight=False)


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
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture to write.")] = Path("partition.png"),
) -> None:
    """Print the clients' sizes and a label histogram, and draw who holds which classes."""
    from .experiment.build import build_data
    from .report.data import write_data_report

    for table in write_data_report(build_data(load_config(file, set_, None)), output):
        print_table(table)
    if output.exists():
        console.print(f"Picture: {output}", highlight=False)


def load_config(file: Path | None, settings: list[str] | None, device: str | None):  # type: ignore[no-untyped-def]
    """The config of a command line."""
    from .experiment.build import resolve_device
    from .experiment.config import resolve
    from .experiment.files import default_file, read_toml, with_settings

    values = read_toml(file or default_file("digits.toml"))
    changes = [*(settings or []), *([f"engine.device={device}"] if device else [])]
    return resolve_device(resolve(with_settings(values, changes), str(file or "the default config")))


def print_table(table) -> None:  # type: ignore[no-untyped-def]
    """A table for the terminal; plain Markdown elsewhere."""
    if not console.is_terminal:
        typer.echo(f"\n{table.title}\n\n{table.markdown()}")
        return
    from rich.table import Table

    drawn = Table(title=table.title, title_justify="left")
    for column, name in enumerate(table.header):
        drawn.add_column(name, justify="right" if table.numeric(column) else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
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
