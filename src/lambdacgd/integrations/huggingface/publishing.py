"""How weights leave a `LambdaCGDTrainer`: saved with their card, uploaded from an allow-list, entered in the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils import PushInProgress

from lambdacgd.integrations.huggingface import hub
from lambdacgd.training import Private, TrainingError
from lambdacgd.training.codec import content_digest

_PushInProgress: Any = PushInProgress  # its jobs are annotated as one future
_Base: Any = object  # stands before Trainer in the method resolution order


class Publishing(_Base):
    """The Trainer's saving and pushing, with nothing in it that is not private."""

    private: Private | None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights, configuration, tokenizer and the privacy card; entered in the ledger first."""
        self._enter_release("save_model")
        super().save_model(output_dir, _internal_call=True)
        if self.private is not None and self.args.should_save:
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            hub.write_card(self.private, folder)
            if not _internal_call:  # a release: the pickled arguments may hold a token and name places of ours
                (folder / "training_args.bin").unlink(missing_ok=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _enter_release(self, kind: str) -> None:
        if self.private is None:
            return
        self.private.cycle.refuse_half_done()
        if not self.is_world_process_zero():
            return  # rank 0 keeps the ledger
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.private.run.release(self.private.steps_taken, digest=content_digest(trained), kind=kind)

    def create_model_card(
        self, language: Any = None, license: Any = None, tags: Any = None, model_name: str | None = None, **kwargs: Any
    ) -> None:
        """A README of public facts: the privacy card, no training results."""
        if self.is_world_process_zero():
            text = self._readme(language=language, license=license, tags=tags, model_name=model_name, **kwargs)
            Path(self.args.output_dir, "README.md").write_text(text, encoding="utf-8")

    def _readme(self, *, tags: Any = None, model_name: str | None = None, **kwargs: Any) -> str:
        if self.private is None:
            raise TrainingError("there is no privacy card before training. Train, then push or make the card")
        tags = [tags] if isinstance(tags, str) else list(tags or [])
        given = {"language": kwargs.get("language"), "license": kwargs.get("license")}
        if kwargs.get("finetuned_from"):
            given["base_model"] = kwargs["finetuned_from"]
        return hub.readme(
            self.model,
            self.private,
            name=model_name,
            tags=[*tags, *(getattr(self.model, "model_tags", None) or [])],
            **given,
        )

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload weights, configuration, tokenizer and the privacy card, and nothing else."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self._finish_current_push()
        return self._push(commit_message or "End of training", token, revision, wait=blocking, **kwargs)

    def _push(self, message: str, token: str | None, revision: str | None, *, wait: bool, **kwargs: Any) -> Any:
        if not self.is_world_process_zero():
            return None
        kwargs.setdefault("model_name", (self.hub_model_id or "").split("/")[-1] or None)
        text = self._readme(**kwargs)
        assert self.private is not None  # or there would be no card
        self._enter_release("push_to_hub")
        folder = hub.stage(self.model, self.private, self._processing(), text)
        return hub.upload(
            folder,
            repo=str(self.hub_model_id),
            message=message,
            token=token if token is not None else self.args.hub_token,
            revision=revision if revision is not None else self.args.hub_revision,
            wait=wait,
        )

    def _processing(self) -> Any:
        return (
            self.processing_class
            if self.processing_class is not None
            else getattr(self.data_collator, "tokenizer", None)
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Every save, if so asked: in the background, unless one is still on its way."""
        strategy = str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy))
        busy = getattr(self, "push_in_progress", None)
        if strategy == "end" or not self.is_world_process_zero():
            return
        if busy is not None and not busy.is_done():
            if not self.args.hub_always_push:
                return
            busy.wait_until_done()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        job = self._push(f"Training in progress, step {self.state.global_step}", None, None, wait=False)
        self.push_in_progress = _PushInProgress([job])
