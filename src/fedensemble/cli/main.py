"""Defines the commands of `fedensemble` with their arguments and help texts.

Each command imports its implementation when it is called, so that `--help` and `--version` do not
load torch.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated

import typer
import typer.core

from ..version import VERSION
from .commands.fleet import fleet_app
from .console import console, print_line, print_table, working
from .exit_codes import run_app

# With rich, typer escapes brackets for rich's markup and prints "\[default: ...]" in help texts.
typer.core.HAS_RICH = False

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # subcommands inherit it
    help="Train, compare and use federated ensembles: K models at the cost of one.",
)
data_app = typer.Typer(
    no_args_is_help=True, help="Download datasets, and show how they are partitioned among clients."
)
app.add_typer(data_app, name="data")
app.add_typer(fleet_app, name="fleet")

File = Annotated[
    Path | None,
    typer.Argument(
        help="Config file (TOML), or the folder of a run, whose config is taken; by default, a "
        "small config on the digits dataset."
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a setting of the config, e.g. --set ensemble.modes=3. Can be repeated.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="Device: cpu, cuda or auto; by default, the one in the config."),
]
RunsFolder = Annotated[Path, typer.Option("--runs", help="Folder under which all runs are stored.")]
Seeds = Annotated[
    str | None, typer.Option(help="Random seeds, separated by commas; one run per seed.")
]
RUNS = Path("runs")


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version
        from platform import python_version

        # From torch's metadata, because importing torch takes a second.
        typer.echo(f"fedensemble {VERSION} (torch {version('torch')}, Python {python_version()})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Train, compare and use federated ensembles: K models at the cost of one."""


@app.command("new")
def new_command(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder to create, such as my-app; its name is the name of the project."
        ),
    ],
) -> None:
    """Write a project of your own: model, data, config, tests and a Flower app.

    Needs no network. Inside the project, `pytest` and `fedensemble run config.toml` work.
    """
    from .commands.new import new_project

    new_project(folder)


@app.command("run")
def run_command(
    file: File = None,
    set_: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run; by default, the folder given instead of a config file, or "
            "RUNS/<name>/<config hash>."
        ),
    ] = None,
    device: Device = None,
    runs: RunsFolder = RUNS,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Minimum number of seconds between checkpoints.", min=0)
    ] = 10.0,
    rank_timeout: Annotated[
        float,
        typer.Option(
            help="With torchrun: seconds without a message after which a rank counts as failed.",
            min=1,
        ),
    ] = 1800.0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print how much time each phase of a round takes.")
    ] = False,
) -> None:
    """Train an ensemble.

    If the run was interrupted, the same command resumes it; if it is finished, nothing is trained.
    With a larger number of rounds, a finished run is extended:
    `fedensemble run FOLDER --set rounds=200` continues the run in a folder, also one that
    Federation.save wrote in Python.
    """
    from .commands.run import run_config

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
        Path | None,
        typer.Argument(
            help="Comparison file or config file (TOML), or the folder of a run, whose config is "
            "taken; by default, a comparison on the digits dataset."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a setting, e.g. --set rounds=50, or compare several values of it, e.g. "
            "--set algorithm.lr=0.1,0.3. Can be repeated: all combinations are compared.",
        ),
    ] = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Algorithms to compare, separated by commas.")
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            help="Numbers of modes K to compare, separated by commas; K = 1 uses one stratum."
        ),
    ] = None,
    schedules: Annotated[
        str | None, typer.Option(help="Schedules to compare, separated by commas.")
    ] = None,
    seeds: Seeds = None,
    device: Device = None,
    runs: RunsFolder = RUNS,
) -> None:
    """Compare algorithms, schedules, numbers of modes, or values of any setting.

    All rows train on the same data with the same seeds. The result is one table and one plot, also
    as CSV, LaTeX, PDF and SVG.
    """
    from .commands.compare import compare_rows
    from .config import all_settings

    compare_rows(file, all_settings(set_, device), algorithms, modes, schedules, seeds, runs)


@app.command("advise")
def advise_command(
    file: File = None,
    set_: Sets = None,
    pilot: Annotated[
        int | None,
        typer.Option(help="Rounds of the pilot; by default a tenth of the config's, at least 20."),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(help="Numbers of modes to try, separated by commas; by default 3,5,10."),
    ] = None,
    seeds: Seeds = None,
    device: Device = None,
    runs: RunsFolder = RUNS,
) -> None:
    """Advise on the number of modes, the schedule and the average of a config.

    Trains a short pilot of FedAvg and of several numbers of modes, tests it on a part of the
    training data, and extrapolates the difference to the last round.
    """
    from .commands.advise import advise
    from .config import all_settings

    advise(file, all_settings(set_, device), pilot, modes, seeds, runs)


@app.command("tune")
def tune_command(
    file: File = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a setting, e.g. --set rounds=50, or search it: a range, e.g. --set "
            "algorithm.lr=log:0.01..1, integers, e.g. --set ensemble.modes=1..8, or choices, e.g. "
            "--set 'algorithm=fedavg|fedprox'. Can be repeated.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Number of trials.", min=1)] = 32,
    batch: Annotated[
        int,
        typer.Option(
            help="Trials that train together. More are faster; fewer learn more from each other.",
            min=1,
        ),
    ] = 16,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Objective on the validation data: accuracy (default), nll or brier; for "
            "regression mse (default) or crps."
        ),
    ] = None,
    seeds: Seeds = None,
    device: Device = None,
    runs: RunsFolder = RUNS,
) -> None:
    """Search hyperparameters on validation data.

    Trials train together in batches. The test set is not used. If the search was interrupted, the
    same command continues it; with more --trials, it is extended. Needs the extra "tune".
    """
    from .commands.tune import tune_settings
    from .config import all_settings

    tune_settings(file, all_settings(set_, device), trials, batch, metric, seeds, runs)


@app.command("reproduce")
def reproduce_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Tables and figures: table1, table2-mnist, table2-cifar10, table2-cifar10-long, "
            "table2-cifar100, table2-shakespeare, table2-openimage, table3, table4, figure-toy, "
            "figure-loss-surface, figure-curves, theory; or all, for all of these. Others: worth "
            "(what K modes are worth), attacks, or the path of a TOML file."
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="Scale: smoke (synthetic data; takes minutes) or full (as in the paper; GPU)."
        ),
    ] = "full",
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Train only cells whose row or column label contains this text. Can be repeated."
        ),
    ] = None,
    set_: Sets = None,
    seeds: Seeds = None,
    device: Device = None,
    runs: RunsFolder = RUNS,
    out: Annotated[Path, typer.Option(help="Folder for the tables and figures.")] = Path(
        "reproduced"
    ),
    collect: Annotated[
        Path | None,
        typer.Option(help="Markdown page to write, with all tables reproduced so far."),
    ] = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train/--no-train",
            help="Whether to train missing runs; without, finished runs are collected, which needs "
            "neither data nor a GPU.",
        ),
    ] = True,
) -> None:
    """Reproduce the paper's tables and figures.

    The tables show our results next to the paper's. Finished runs are not trained again.
    """
    from .commands.reproduce import reproduce_names

    reproduce_names(
        names or [], scale, set_ or [], seeds, device, only or [], runs, out, collect, train
    )


@app.command("predict")
def predict_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    inputs: Annotated[
        Path,
        typer.Argument(
            help="An .npz file with an array x, or with a single array; scaled as in training. For "
            "runs on images, tables or documents also a folder of images, a table, or texts."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz or .csv file to write.")],
    members: Annotated[
        bool, typer.Option(help="Also write each model's prediction and the index of its mode.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or auto.")] = "auto",
    abstain_above: Annotated[
        float | None,
        typer.Option(help="Leave rows unanswered whose uncertainty is above this threshold."),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(help="Answer only this share of the rows, the surest: 0.9 for 90 %."),
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(
            help="Answer as many rows as possible with at most this share of errors among the "
            "answers: 0.05 for 5 %. Needs a calibrated run."
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="Measure of uncertainty for these three options: entropy (default), "
            "mutual_information, max_probability, energy or variation_ratio."
        ),
    ] = None,
    personal: Annotated[
        str | None,
        typer.Option(
            help="Predict with the personal model of a client: the method given to `fedensemble "
            "personalize`, with --client."
        ),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="Name or index of the client that the rows belong to, with --personal or for a "
            "run that was calibrated for each client."
        ),
    ] = None,
) -> None:
    """Predict with the ensemble of a finished run.

    Writes the mean prediction, and for classification the label, its name, entropy and mutual
    information, for regression the variance. A row that is left unanswered has no label, and a
    .csv says why. A calibrated run adds prediction sets or intervals.
    """
    with working("Predicting"):
        from .commands.predict import AbstentionRule, predict_file

        sentence = predict_file(
            run,
            inputs,
            output,
            members=members,
            device=device,
            rule=AbstentionRule(abstain_above, coverage, risk, score),
            personal=personal,
            client=client,
        )
    print_line(sentence)


@app.command("calibrate")
def calibrate_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    alpha: Annotated[
        float,
        typer.Option(help="Share of targets that may be outside of prediction sets or intervals."),
    ] = 0.1,
    method: Annotated[
        str | None,
        typer.Option(
            help="Prediction sets: lac (default), aps or raps; intervals for regression: absolute "
            "(default) or cqr; none makes neither."
        ),
    ] = None,
    temperature: Annotated[
        str | None,
        typer.Option(help="What is scaled: mean, member, none, or auto (default), the better one."),
    ] = None,
    scope: Annotated[
        str | None,
        typer.Option(help="Which rows keep alpha: mixture (default), pool, client or class."),
    ] = None,
    penalty: Annotated[float | None, typer.Option(help="Of raps; by default 0.01.")] = None,
    free_classes: Annotated[int | None, typer.Option(help="Of raps; by default 1.")] = None,
    randomized: Annotated[
        bool | None,
        typer.Option("--randomized/--not-randomized", help="Of aps and raps; default: randomized."),
    ] = None,
    abstain: Annotated[
        str | None,
        typer.Option(
            help="Scores that `predict --risk` can then leave rows unanswered by, separated by "
            "commas; by default entropy."
        ),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            help="An .npz file with arrays x, y and, for several clients, client, to use instead "
            "of the calibration rows of the run's data."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or auto.")] = "auto",
) -> None:
    """Calibrate a finished run: right probabilities, and prediction sets with a guarantee.

    Uses the rows of data.calibration, which no mode was trained on, by sums that clients would
    send. `predict`, `export` and load_ensemble then apply the result, and the report shows it. To
    calibrate at the end of every run, put a table [calibration] into the config.
    """
    settings = {
        "alpha": alpha,
        "method": method,
        "temperature": temperature,
        "scope": scope,
        "penalty": penalty,
        "free_classes": free_classes,
        "randomized": randomized,
        "abstain": None if abstain is None else [name for name in abstain.split(",") if name],
    }
    with working("Calibrating"):
        from .commands.calibrate import calibrate

        tables = calibrate(run, rows, device, settings)
    for table in tables:
        print_table(table)


@app.command("personalize")
def personalize_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    method: Annotated[
        str,
        typer.Option(
            help="How clients use the modes: select, mix, posterior, tune or head; several are "
            "separated by commas."
        ),
    ] = "select,mix",
    steps: Annotated[
        int | None, typer.Option(help="Local steps of tune and head; by default 20.")
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Their learning rate; by default that of the last round."),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Their optimizer, such as adam; by default sgd.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Their batch size; by default that of the training.")
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            help="Names of the parameters that head trains, such as 'head.*'. Can be repeated."
        ),
    ] = None,
    prior: Annotated[
        float | None,
        typer.Option(help="Imagined rows that speak for equal weights, of mix; by default 1."),
    ] = None,
    device: Device = None,
) -> None:
    """Make models of single clients from a finished run, and test each client's own.

    Each client gets the K modes once and compares them on its own validation rows
    (data.calibration), never on test rows. The result is saved in the run's folder;
    `fedensemble predict RUN x.npz --personal select --client 3 -o out.csv` uses it.
    """
    settings = {
        "steps": steps,
        "lr": lr,
        "optimizer": optimizer,
        "batch_size": batch_size,
        "head": head or None,
        "prior": prior,
    }
    with working("Making personal models"):
        from .commands.personalize import personalize_run

        table, lines = personalize_run(run, method, device, settings)
    print_table(table)
    for line in lines:
        print_line(line)


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The .onnx or .pt2 (torch.export) file to write.")
    ],
    modes: Annotated[
        str | None,
        typer.Option(
            help="Modes to write: best:3 for the best three, or numbers such as 0,2,4; by default, "
            "all."
        ),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            help="An .npz file with arrays x and y to choose the best modes by; by default, the "
            "run's rows for calibration or validation, never its test rows."
        ),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="Client whose prediction sets or intervals the file makes, by name or index, if "
            "the run was calibrated for each client."
        ),
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(
            help="Adds an output answered: whether a row is sure enough that at most this share "
            "of the answers is wrong. Needs a calibrated run."
        ),
    ] = None,
) -> None:
    """Write the ensemble of a finished run as one file that runs without fedensemble.

    The file takes inputs as in training, and returns mean, label, entropy, mutual_information and
    members, or for regression mean, variance and members; a calibrated run adds sets or interval.
    It is compared with the predictions of the run before it is written. ONNX needs the extra
    "export".
    """
    with working("Exporting"):
        from .commands.export import export_file, ranking_table

        file = export_file(run, output, modes, rows, client, risk)
    if (table := ranking_table(file)) is not None:
        print_table(table)
    print_line(file)


@app.command("distill")
def distill_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="Folder of the distilled model; by default, that of the run with -plain or "
            "-dirichlet at its end.",
        ),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="What the model learns: plain (the mean prediction) or dirichlet (the "
            "distribution of the members' predictions)."
        ),
    ] = "plain",
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="An .npz file with unlabelled inputs x; by default, those of the server in the "
            "run's data (data.server_share, data.server_file)."
        ),
    ] = None,
    ood: Annotated[
        Path | None,
        typer.Option(
            help="An .npz file with inputs x unlike the training data, to compare scores of "
            "uncertainty; by default, test inputs with shuffled features."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Another architecture, e.g. --set model.hidden=[32]. Can be repeated. By default, "
            "that of the modes.",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the inputs.", min=1)] = 100,
    batch_size: Annotated[int, typer.Option(help="Inputs per step.", min=1)] = 32,
    lr: Annotated[float, typer.Option(help="Learning rate at the start; it falls to 0.")] = 0.003,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Temperature of both predictions while the model learns, by default 1. For "
            "dirichlet that at the start, which falls to 1; with --set it is 10 by default."
        ),
    ] = None,
    mixup: Annotated[
        bool, typer.Option(help="Learn on weighted means of two inputs each; never of tokens.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Random seed.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or auto.")] = "auto",
) -> None:
    """Train one model to predict what the ensemble of a finished run predicts.

    It learns on inputs without labels, and becomes a folder that predict, export and report take.
    The report compares both: metrics on the test set, and how well they find unusual inputs.
    """
    from .commands.distill import distill_and_report

    distill_and_report(
        run,
        out,
        inputs,
        ood,
        set_ or [],
        device,
        kind=kind,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        temperature=temperature,
        mixup=mixup,
        seed=seed,
    )


@app.command("report")
def report_command(
    path: Annotated[
        Path, typer.Argument(help="Folder of a run (finished or not) or of a comparison.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML page to write; by default, report.html in that folder."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write an HTML report of a run or a comparison, and print its table."""
    with working("Writing the report"):
        from .commands.report import write_and_warn

        table, page = write_and_warn(path, out)
    print_table(table)
    print_line(f"Report: {page}")
    if open_:
        typer.launch(page.resolve().as_uri())


@app.command("watch")
def watch_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run, also one that has not begun.")],
    port: Annotated[
        int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)
    ] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show the report of a run in a browser, and update it while the run trains.

    Prints the address of the page, and serves it to this machine until Ctrl-C. The run may be
    trained by another process. Nothing is written.
    """
    from .commands.watch import watch

    watch(run, port, open_)


@app.command("deploy")
def deploy_command(
    file: File = None,
    set_: Sets = None,
    out: Annotated[
        Path, typer.Option(help="Folder to write the app to; it must not exist yet.")
    ] = Path("fleet"),
) -> None:
    """Write a Flower app that trains a config on real clients.

    Running the app needs the extra "flower".
    """
    with working("Reading the data"):
        from ..deploy.generate import write_app
        from .config import load_config

        lines = write_app(load_config(file, set_), out)
    for line in lines:
        print_line(line)


@app.command("show")
def show_command(file: File = None, set_: Sets = None) -> None:
    """Print a config with all defaults filled in."""
    from .config import read_config

    typer.echo(read_config(file, set_).toml(empty=False), nl=False)


@app.command("ls")
def list_command(
    what: Annotated[
        str | None,
        typer.Argument(
            help="What to list: aggregators, algorithms, attacks, averages, datasets, engines, "
            "models, optimizers, participations, partitions, schedules or runs; by default, these "
            "topics with the names of their entries."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="Name of one entry; prints it with all of its options.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    runs: RunsFolder = RUNS,
) -> None:
    """List what is available, with options and defaults."""
    from .commands.ls import print_listing

    print_listing(what, name, runs, json)


@app.command("cite")
def cite_command(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Config or comparison files, folders of runs, or names of algorithms; their "
            "algorithms are cited as well."
        ),
    ] = None,
) -> None:
    """Print BibTeX entries of the paper, of this package, and of the algorithms that are used."""
    from .commands.cite import cite

    typer.echo(cite(what or []), nl=False)


@app.command("rm")
def remove_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of the runs to delete, as `fedensemble ls runs` shows them."),
    ] = None,
    unfinished: Annotated[
        bool,
        typer.Option(
            "--unfinished",
            help="Delete only unfinished runs; without folders, all unfinished runs below --runs.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    runs: RunsFolder = RUNS,
) -> None:
    """Delete runs.

    Asks before it deletes. A folder that holds anything but a run, or in which another process
    trains, is kept.
    """
    from .commands.rm import remove_runs

    remove_runs(paths or [], runs, unfinished=unfinished, yes=yes)


@app.command("bench")
def bench_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Benchmark: engines (speed), growth (time and memory by problem size) or models "
            "(speed of networks as they come); by default, the first two."
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Networks of benchmark `models`, separated by commas, such as vit,gpt,convnext, "
            "or 'all'; selects that benchmark."
        ),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Clients per round, for benchmark `models`.", min=1)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Batch size, for benchmark `models`.", min=2)
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or auto.")] = "cpu",
    seconds: Annotated[
        float, typer.Option(help="Seconds to spend on each measurement.", min=0)
    ] = 2.0,
    full: Annotated[
        bool, typer.Option("--full", help="Measure all cases at full size; meant for a GPU.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write the tables to, as JSON.")
    ] = None,
) -> None:
    """Measure the speed of the engines on this machine.

    Compares batched clients with a loop over clients, and shows how time and memory grow with the
    problem. The default takes less than a minute on a CPU. `fedensemble bench --models vit,gru`
    compares other networks, with 50 clients and batch 16 on a GPU, and 4 clients on a CPU.
    """
    with working("Measuring"):
        from ..bench.cli import bench, bench_models
        from ..federation.resolve import select_device

        where = str(select_device(device))
        if models is not None or name == "models":
            bench_models(name, models, clients, batch, where, seconds, out, console.print)
        else:
            bench(name, where, seconds, full, out, console.print)


@data_app.command("get")
def get_command(
    name: Annotated[
        str, typer.Argument(help="Dataset: mnist, fashion-mnist, cifar10, cifar100 or shakespeare.")
    ],
    root: Annotated[
        Path | None,
        typer.Option(
            help="Folder to download to; by default, $FEDENSEMBLE_DATA or a cache folder."
        ),
    ] = None,
) -> None:
    """Download a dataset and verify its checksum."""
    from .commands.data import download

    for path in download(name, root):
        print_line(path)


@data_app.command("show")
def show_data_command(
    file: File = None,
    set_: Sets = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="PNG file for a plot of the classes of each client."),
    ] = None,
) -> None:
    """Print the number of examples per client and a histogram of labels.

    With -o, also plot which classes each client has.
    """
    with working("Reading the data"):
        from ..config.build import build_data
        from ..report.data_report import write_data_report
        from .config import load_config

        tables, message = write_data_report(build_data(load_config(file, set_)), output)
    for table in tables:
        print_table(table)
    if message:
        print_line(message)


def main() -> None:
    """Runs the command line and exits; user errors print one message, without a traceback.

    This process belongs to the command, so process-wide settings may be changed here, which a
    library must not do. Imported objects never become garbage: excluding them from garbage
    collection (`gc.freeze`) saves half a second per command. It is called again at the end because
    Python also collects when it exits. For the allocator see `keep_freed_memory`.
    """
    from ..runtime.malloc import keep_freed_memory
    from ..scaffold.trusted import activate_project

    gc.freeze()
    keep_freed_memory()
    activate_project(Path.cwd())
    code = run_app(app)
    gc.freeze()
    sys.exit(code)
