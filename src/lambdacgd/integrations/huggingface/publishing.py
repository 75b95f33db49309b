"""What may leave for a model hub: weights, configuration, tokenizer and the privacy card, and nothing else.

An allow-list, not a list of exceptions: files are written anew into a folder of their own, and only that is uploaded.
The output folder, with its training losses, checkpoints and logs, never is.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData

from lambdacgd.training import Private
from lambdacgd.training.card import PUBLIC, to_markdown, write_card
from lambdacgd.training.checkpoint import write_tensors
from lambdacgd.training.distributed.models import whole_state
from lambdacgd.training.export import WEIGHTS

TAGS = ("differential-privacy", "lambdacgd")


def readme(model: Any, private: Private, *, name: str | None, tags: Iterable[str], **metadata: Any) -> str:
    """A model card of public facts: no loss, no metric, no hyperparameter chosen on data."""
    is_adapter = hasattr(model, "peft_config")
    found = {"library_name": "peft" if is_adapter else "transformers", "tags": sorted({*TAGS, *tags})}
    base = getattr(getattr(model, "config", None), "_name_or_path", "")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists():  # a name on the hub, not a place of ours
        found["base_model"] = base
    data = ModelCardData(**(found | {key: value for key, value in metadata.items() if value is not None}))
    privacy = to_markdown(private.card()).removeprefix("# Privacy card\n")
    return f"---\n{data.to_yaml()}\n---\n\n# {name or 'Model'}\n\nTrained with lambdacgd.\n\n## Privacy card\n{privacy}"


def upload(
    model: Any,
    private: Private,
    processing: Any,
    card_text: str,
    *,
    repo: str,
    message: str,
    token: str | None,
    revision: str | None,
) -> Any:
    """Write exactly what may be published into a new folder, upload that, and remove it."""
    with tempfile.TemporaryDirectory(prefix="lambdacgd-upload-") as name:
        folder, api = Path(name), HfApi()
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)
        else:
            write_tensors(folder / WEIGHTS, whole_state(model, keep=True), mode=PUBLIC)
        if processing is not None:
            processing.save_pretrained(folder)
        write_card(private.card(), folder)
        (folder / "README.md").write_text(card_text, encoding="utf-8")
        ModelCard.load(folder / "README.md")  # its metadata must be readable
        return api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=message, token=token, revision=revision
        )
