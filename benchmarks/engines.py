"""How much faster batched visits are than one client after another, in samples per second.

    python benchmarks/engines.py [cnn-100 resnet18-10-16 ... | all] [--seconds 3] [--precision bf16]
                                    [--device cuda]

CNN with 10, 100 and 1,000 clients per round, ResNet-18 with 10, 30 and 60 at batch 16 and 50,
ResNet-20 with BatchNorm and with GroupNorm, an LSTM, pfl's CNN, an MLP.
"""

from fedensemble.bench.throughput import main

if __name__ == "__main__":
    main()
