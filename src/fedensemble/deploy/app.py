"""The ServerApp and the ClientApp of a Flower app. Flower is imported only when one is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, FedEnsembleError, InputError, config_keys
from .app_spec import read_app_spec

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from ..config.schema import Config
    from ..engines.flower.client import LocalClient

Load = Callable[[Mapping[str, Any]], tuple[Any, Any]]
logger = logging.getLogger("flwr")  # Flower shows this logger


class SiteDataError(DataError):
    """A client's load() failed. The text continues a sentence that begins with its name."""


def server_app(folder: Path) -> ServerApp:
    """Returns the ServerApp of the app in a folder. It runs the rounds."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from .server import run_fleet

        # Flower logs an exception of the app with its traceback. Errors that this package raises
        # on purpose say what to do; their traceback would only hide that.
        logger.addFilter(_hide_traceback)
        with config_keys():
            run_fleet(grid, read_app_spec(folder), context.run_config)

    return app


def client_app(folder: Path, load: Load) -> ClientApp:
    """Returns the ClientApp of the app in a folder.

    Args:
        folder: folder with the app's config.toml and facts.toml.
        load: returns this client's inputs and targets, given its node's `--node-config`.
    """
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        from ..engines.flower.client import answer_with_problem

        try:
            with config_keys():
                client = build_client(folder, load, context)
                require_memory(read_app_spec(folder).config, context.node_config)
        except Exception as error:  # load() is the site's own code, and may raise anything
            logger.error("This client cannot enrol.", exc_info=error)
            text = str(error) if isinstance(error, FedEnsembleError) else describe(error)
            known = isinstance(error, SiteDataError)
            return answer_with_problem(message, context, text if known else f"cannot enrol: {text}")
        return client.answer_query(message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        from .client_calibration import answer_query

        with config_keys():
            client = build_client(folder, load, context)
            return answer_query(message, context, read_app_spec(folder), client)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with config_keys():
            return build_client(folder, load, context).train(message, context)

    return app


def build_client(folder: Path, load: Load, context: Context) -> LocalClient:
    """Returns the client of this node, ready to train."""
    from ..engines.flower.client import LocalClient
    from ..federation.resolve import check_outputs, resolve_work
    from ..modeling.server_context import ServerContext

    spec = read_app_spec(folder)
    model = spec.build_model(str(context.node_config.get("device", "cpu")))
    try:
        pair = load(dict(context.node_config))
    except Exception as error:  # load() is the site's own code
        raise SiteDataError(f"cannot load its data: {describe(error)}") from error
    data = spec.build_client_data(pair)
    check_outputs(model, data)
    training = spec.config.training
    work = resolve_work(
        model, training.epochs, training.steps, training.batch_size, training.last_batch
    )
    # Bind the algorithm as on the server: it may need the model's structure on the client too. For
    # example, FedMA freezes layers during local training.
    example = data.inputs(data.x[:1].to(model.device), model.dtype)
    algorithm = spec.algorithm.bind(ServerContext(model, example))
    if spec.config.ensemble.personal:
        algorithm = spec.with_personal_parts(model, algorithm)
    return LocalClient(model, algorithm, data, work, spec.config.seed)


def require_memory(config: Config, node: Mapping[str, Any]) -> None:
    """Raises InputError if personal models are to be kept by a node that has no place for them.

    It is asked when the client enrols, because at the end of the run it would be too late.
    """
    if config.personalize is not None and not node.get("memory-dir"):
        raise InputError(
            "the config has a table [personalize], and this SuperNode no folder to keep a personal "
            'model in: add memory-dir="/srv/memory" to its --node-config.'
        )


def describe(error: Exception) -> str:
    """Returns type and text of an error, such as "FileNotFoundError: ...".

    >>> describe(KeyError("pulse"))
    "KeyError: 'pulse'"
    """
    return f"{type(error).__name__}: {error}"


def _hide_traceback(record: logging.LogRecord) -> bool:
    """A log filter that keeps only the message of this package's own errors."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FedEnsembleError):
        record.msg, record.args, record.exc_info = "%s", (str(error),), None
    return True
