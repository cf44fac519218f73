"""The README's example on real digits: python examples/quickstart.py."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import fedensemble as fe

CLIENTS, TEST = 50, 397


class MyNet(nn.Module):
    """An MLP from 64 pixels to ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def digits() -> tuple[fe.FederatedData, torch.Tensor, torch.Tensor]:
    """Federated data of clients with few digits each, and a test set."""
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x, y = (x / 16).float(), y.long()
    # Sorting by digit and cutting into chunks gives each client one or two digits.
    order = torch.argsort(y[TEST:], stable=True)
    clients = zip(x[TEST:][order].chunk(CLIENTS), y[TEST:][order].chunk(CLIENTS), strict=True)
    return fe.FederatedData.from_clients(list(clients)), x[:TEST], y[:TEST]


def main() -> None:
    """Trains an ensemble, tests it and prints its uncertainty on right and wrong predictions."""
    data, x_test, y_test = digits()
    federation = fe.Federation(
        model=MyNet,
        data=data,
        algorithm=fe.FedProx(lr=0.2, mu=0.01),
        modes=5,
        strata=10,
        clients_per_round=20,
        epochs=5,
        batch_size=16,
        loss="cross_entropy",
        engine="vector",
        device="cpu",
        seed=0,
    )
    for report in federation.rounds(100):  # the body of your `for` is the callback
        if report.round % 20 == 0:
            prediction = federation.ensemble.predict(x_test)
            accuracy = fe.evaluate(prediction, y_test)["accuracy"]
            progress = f"round {report.round}, age {report.age}: loss {report.loss:.3f}"
            print(f"{progress}, test accuracy {accuracy:.3f}")
    wrong = prediction.mean.argmax(-1) != y_test
    for name, mask in (("right", ~wrong), ("wrong", wrong)):
        print(f"mean entropy where it is {name}: {prediction.entropy[mask].mean():.2f}")


if __name__ == "__main__":
    main()
