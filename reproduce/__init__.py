"""The paper's tables and figures, regenerated, and what goes beyond them; see ``framework`` for how one is written.

``EXPERIMENTS`` names them without importing anything heavy: name -> ("module:attribute", what it shows).
"""

EXPERIMENTS: dict[str, tuple[str, str]] = {
    "rmse-table": ("reproduce.rmse_table:EXPERIMENT", "the paper's RMSE table, every mechanism and ε, beside ours"),
    "fresh-bins-table": (
        "reproduce.fresh_bins_table:EXPERIMENT",
        "the RMSE table's twin with bins redrawn every epoch, beside the paper's fixed ones",
    ),
    "normalized-ratio": (
        "reproduce.normalized_ratio:EXPERIMENT",
        "RMSE of column-normalised over plain λCGD for grids of k and b",
    ),
    "lambda-theory": (
        "reproduce.lambda_theory:EXPERIMENT",
        "the λ of each objective over batch size, epochs and ε; the full-batch constants",
    ),
    "runtime-cifar": (
        "reproduce.runtime:CIFAR",
        "the paper's runtime table for CIFAR-10: seconds an epoch and memory, by how the noise is made",
    ),
    "runtime-imdb": (
        "reproduce.runtime:IMDB",
        "the paper's runtime table for IMDb: seconds an epoch and memory, by how the noise is made",
    ),
    "frontier": (
        "reproduce.frontier:EXPERIMENT",
        "test accuracy on CIFAR-10 over epochs, each method at its own best batch size (needs the data: --data)",
    ),
    "lower-noise": (
        "reproduce.lower_noise:EXPERIMENT",
        "test accuracy on CIFAR-10 of what might need less noise than the default (needs the data: --data)",
    ),
    "record": (
        "reproduce.record:EXPERIMENT",
        "test accuracy on CIFAR-10 by modern recipes at little compute, beside the state of the art (needs the data)",
    ),
    "methods-cifar": (
        "reproduce.methods_table:CIFAR_METHODS",
        "test accuracy on CIFAR-10 over ε, every method tuned alike (needs the data: --data)",
    ),
    "paper-setting": (
        "reproduce.paper_setting:EXPERIMENT",
        "test accuracy on CIFAR-10 with the paper's own rates and ζ = 8, with and without GroupNorm (needs --data)",
    ),
    "methods-imdb": (
        "reproduce.methods_table:IMDB_METHODS",
        "test accuracy on IMDb over ε, every method tuned alike (needs the data: --data)",
    ),
    "fine-tuning": (
        "reproduce.fine_tuning:EXPERIMENT",
        "test accuracy on IMDb of a BERT, fine-tuned privately (needs the data and a BERT: --data, --weights)",
    ),
    "lstm-imdb": (
        "reproduce.methods_table:LSTM",
        "test accuracy of an LSTM on IMDb, trained from scratch (needs the data: --data)",
    ),
    "lambda-sweep": (
        "reproduce.sweeps:LAMBDA_SWEEP",
        "validation accuracy over λ, batch sizes and ε, without amplification (needs the data: --data)",
    ),
    "amplified-sweep": (
        "reproduce.sweeps:AMPLIFIED_SWEEP",
        "validation accuracy over λ under Balls-in-Bins (needs the data: --data)",
    ),
    "epochs-sweep": (
        "reproduce.sweeps:EPOCHS_SWEEP",
        "validation accuracy over λ for 20, 40 and 80 epochs (needs the data: --data)",
    ),
    "zoo": (
        "reproduce.zoo:EXPERIMENT",
        "which architectures of transformers can be trained privately, by us and by Opacus",
    ),
    "zoo-probe": (
        "reproduce.zoo:TRAINED",
        "how far an example's rows lie apart where another one is exchanged, over architectures of transformers",
    ),
}
