"""Private training inside libraries people already train with. Nothing here is imported by ``import lambdacgd``.

``lambdacgd.integrations.huggingface``: ``LambdaCGDTrainer``, a ``transformers.Trainer``.
``lambdacgd.integrations.lightning``: ``LambdaCGDStrategy`` for ``lightning.Trainer``.
"""
