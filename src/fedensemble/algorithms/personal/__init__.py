"""Models of single clients or groups of clients: Ditto, IFCA, FedEM and local training."""
