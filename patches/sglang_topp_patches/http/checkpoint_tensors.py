"""List the tensors of a checkpoint, so that a client can check a weight push before it sends anything.

SGLang ignores tensors whose names its model does not know, and notices no missing tensor. A push that has the
names and shapes of the checkpoint that the engine was started with reaches every weight of the model.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sglang_topp.errors import InvalidInputError

PATH = "/sglang_topp/checkpoint_tensors"
"""`GET PATH` lists the tensors of the checkpoint that the engine was started with, and with `?model_path=...`
those of another one: `{"tensors": {name: shape}, "optional": [name]}`."""

# The names of a decoder's layers. The number tells the layers of a draft model (MTP) from the model's own.
_LAYER = re.compile(r"(?:(?:language_)?model\.){0,2}layers\.(\d+)\.")
_CACHED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


@dataclass
class Checkpoint:
    """The checkpoint that an engine started from.

    A later push may change the engine's own `model_path`, so the path is kept here.

    Attributes:
        path: a folder, or the name of a model on the Hugging Face hub.
        revision: the revision on the hub, or None for the newest.
        download_dir: the cache for models from the hub, or None for the default cache.
        is_tied: whether the model's LM head is its embedding.
        num_layers: the model's number of layers.
    """

    path: str
    revision: str | None
    download_dir: str | None
    is_tied: bool
    num_layers: int
    _tensors: dict[str, list[int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, manager: Any, server_args: Any) -> Checkpoint:
        """Read the checkpoint's attributes from SGLang's `TokenizerManager` and `ServerArgs`."""
        config = manager.model_config.hf_config
        text = manager.model_config.hf_text_config
        return cls(
            server_args.model_path,
            server_args.revision,
            server_args.download_dir,
            all(getattr(each, "tie_word_embeddings", False) for each in (config, text)),
            text.num_hidden_layers,
        )

    def answer(self, model_path: str | None) -> dict[str, Any]:
        """Return the names and shapes of a checkpoint's tensors, and which of them a push may leave out.

        Args:
            model_path: the checkpoint to read, or None for the one that the engine started from.

        Raises:
            InvalidInputError: the checkpoint is not there, or cannot be read.
        """
        if model_path is not None:
            tensors = _read(model_path, None, self.download_dir)
        else:
            tensors = self._tensors = self._tensors or _read(self.path, self.revision, self.download_dir)
        return {"tensors": tensors, "optional": [name for name in tensors if self._is_optional(name)]}

    def _is_optional(self, name: str) -> bool:
        """Return whether the model does not load a tensor of its checkpoint."""
        layer = _LAYER.match(name)
        return (
            (self.is_tied and (name == "lm_head.weight" or name.endswith(".lm_head.weight")))
            or name.endswith(_CACHED)
            or name.startswith("mtp.")
            or (layer is not None and int(layer[1]) >= self.num_layers)
        )


def add_route(app: Any, checkpoint: Callable[[], Checkpoint | None]) -> None:
    """Add the route to SGLang's application. It needs the same API key as SGLang's updates of the weights."""

    def checkpoint_tensors(request: Request) -> JSONResponse:
        if (start := checkpoint()) is None:
            return JSONResponse({"error": "this engine does not know its checkpoint"}, 503)
        try:
            return JSONResponse(start.answer(request.query_params.get("model_path")))
        except InvalidInputError as error:
            return JSONResponse({"error": str(error)}, 400)

    for route in app.routes:
        if getattr(route, "path", None) == "/update_weights_from_disk":
            checkpoint_tensors._auth_level = route.endpoint._auth_level  # type: ignore[attr-defined]  # SGLang's
    app.router.routes.append(Route(PATH, checkpoint_tensors, methods=["GET"]))


def _read(path: str, revision: str | None, download_dir: str | None) -> dict[str, list[int]]:
    """Return the name and the shape of each tensor that SGLang would read from a checkpoint."""
    expected = "expected a folder with .safetensors or .bin files, or a model of the Hugging Face hub"
    try:
        for files, read in (("*.safetensors", _safetensors), ("pytorch_model*.bin", _pickled)):
            folder = path
            if not os.path.isdir(path):
                from huggingface_hub import snapshot_download

                folder = snapshot_download(
                    path, revision=revision, cache_dir=download_dir, allow_patterns=[files, "*.json"]
                )
            paths = sorted(glob.glob(os.path.join(glob.escape(folder), files)))
            if tensors := dict(read(folder, paths)):
                return tensors
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise InvalidInputError(f"model_path: got {path!r}, {expected}; {problem}") from error
    raise InvalidInputError(f"model_path: got {path!r} without tensors, {expected}")


def _safetensors(folder: str, paths: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    from safetensors import safe_open

    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.isfile(index):
        # A folder may hold the same tensors a second time in files that the index does not list, and SGLang
        # ignores these files.
        with open(index, encoding="utf-8") as text:
            listed = {os.path.join(folder, name) for name in json.load(text)["weight_map"].values()}
        if lost := listed - set(paths):
            raise FileNotFoundError(f"{min(lost)}, which the index lists")
        paths = [path for path in paths if path in listed]
    for path in paths:
        with safe_open(path, framework="pt") as data:  # a file that ends early raises an error
            for name in data.keys():  # noqa: SIM118  # `data` is no mapping
                yield name, data.get_slice(name).get_shape()


def _pickled(folder: str, paths: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    import torch

    for path in paths:
        for name, tensor in torch.load(path, map_location="meta", mmap=True, weights_only=True).items():
            yield name, list(tensor.shape)
