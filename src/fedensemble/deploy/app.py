"""The two halves of a Flower app; Flower is imported only when one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .app_spec import read_description

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from ..engines.flower.client import LocalClient

Load = Callable[[Mapping[str, Any]], tuple[Any, Any]]


def server_app(folder: Path) -> ServerApp:
    """The server's half of the app in a folder: it owns the rounds."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from .server import run_fleet

        run_fleet(grid, read_description(folder), context.run_config)

    return app


def client_app(folder: Path, load: Load) -> ClientApp:
    """A client's half of the app in a folder.

    Args:
        load: gives this client's inputs and targets, from its node's `--node-config`.
    """
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return local_client(folder, load, context).answer_query(message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return local_client(folder, load, context).train(message, context)

    return app


def local_client(folder: Path, load: Load, context: Context) -> LocalClient:
    """The client on whose node this runs, ready to train."""
    from ..engines.flower.client import LocalClient
    from ..federation.resolve import check_outputs, resolve_work
    from ..modeling.server_context import ServerContext

    description = read_description(folder)
    learner = description.learner(str(context.node_config.get("device", "cpu")))
    data = description.client_data(load(dict(context.node_config)))
    check_outputs(learner, data)
    training = description.config.training
    work = resolve_work(
        learner, training.epochs, training.steps, training.batch_size, training.last_batch
    )
    # Bound as on the server: a method may need the model's structure (FedMA freezes layers) on this
    # side, too.
    workshop = ServerContext(learner, data.inputs(data.x[:1].to(learner.device), learner.dtype))
    return LocalClient(
        learner, description.algorithm.bind(workshop), data, work, description.config.seed
    )
