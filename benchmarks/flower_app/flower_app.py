"""The Flower client and server of `cpu_flower.py`: Flower's FedAvg, our model and training."""

import json
import time
from pathlib import Path
from typing import Any

from cpu_flower import CLIENTS, COHORT, IMAGES, network, train
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def fit(message: Message, context: Context) -> Message:
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train(model, int(context.node_config["partition-id"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": IMAGES})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Trains, and writes the end times of the rounds to the file that the run's settings name."""
    rounds, ends = int(context.run_config["rounds"]), []

    def note(round: int, arrays: Any) -> None:
        ends.append(time.time())

    strategy = FedAvg(
        fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS
    )
    result = strategy.start(
        grid, ArrayRecord(network().state_dict()), num_rounds=rounds, evaluate_fn=note
    )
    if sum(bool(metrics) for metrics in result.train_metrics_clientapp.values()) < rounds:
        raise SystemExit("Flower's clients failed; see Flower's output above.")
    Path(str(context.run_config["ends"])).write_text(json.dumps(ends), encoding="utf-8")
