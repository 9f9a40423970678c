"""The tensors that an engine lists are those that SGLang reads from a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import save_file
from starlette.testclient import TestClient

from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.http.checkpoint_tensors import PATH, Checkpoint, add_route

NAMES = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.1.norm.weight",
    "model.layers.2.norm.weight",
    "model.language_model.layers.2.norm.weight",
    "model.layers.1.self_attn.rotary_emb.inv_freq",
    "model.vision_tower.layers.7.norm.weight",
    "mtp.fc.weight",
)
TENSORS = {name: torch.zeros(i + 1, 2) for i, name in enumerate(NAMES)}
SHAPES = {name: [i + 1, 2] for i, name in enumerate(NAMES)}


def checkpoint(folder: Path, *, is_tied: bool = False) -> Checkpoint:
    config = SimpleNamespace(tie_word_embeddings=is_tied, num_hidden_layers=2)
    manager = SimpleNamespace(model_config=SimpleNamespace(hf_config=config, hf_text_config=config))
    arguments = SimpleNamespace(model_path=str(folder), revision=None, download_dir=None)
    return Checkpoint.of(manager, arguments)


@pytest.mark.parametrize("is_tied", [False, True])
def test_tensors_that_the_model_does_not_load_are_optional(tmp_path: Path, is_tied: bool) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    answer = checkpoint(tmp_path, is_tied=is_tied).answer(None)
    assert answer["tensors"] == SHAPES
    tied = ["lm_head.weight"] if is_tied else []
    assert set(answer["optional"]) == {*tied, NAMES[3], NAMES[4], NAMES[5], NAMES[7]}


def test_every_form_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    for folder in ("one", "sharded", "pickled"):
        (tmp_path / folder).mkdir()
    save_file(TENSORS, tmp_path / "one" / "model.safetensors")
    parts = (dict(list(TENSORS.items())[:3]), dict(list(TENSORS.items())[3:]))
    for i, part in enumerate(parts):
        save_file(part, tmp_path / "sharded" / f"model-{i}.safetensors")
        torch.save(part, tmp_path / "pickled" / f"pytorch_model-{i}.bin")
    torch.save({"step": 3}, tmp_path / "pickled" / "training_args.bin")
    index = {"weight_map": {name: f"model-{i}.safetensors" for i, part in enumerate(parts) for name in part}}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"other": torch.zeros(1)}, tmp_path / "sharded" / "consolidated.safetensors")
    for folder in ("one", "sharded", "pickled"):
        assert checkpoint(tmp_path).answer(str(tmp_path / folder))["tensors"] == SHAPES
    os.remove(tmp_path / "sharded" / "model-1.safetensors")
    with pytest.raises(InvalidInputError, match=r"model-1.safetensors, which the index lists"):
        checkpoint(tmp_path).answer(str(tmp_path / "sharded"))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def cut_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    folder.rmdir()


@pytest.mark.parametrize("damage", [cut, cut_header, remove, lambda folder: next(folder.iterdir()).unlink()])
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, damage: Any) -> None:
    folder = tmp_path / "pushed"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    damage(folder)
    with pytest.raises(InvalidInputError, match=f"model_path: got '{folder}'.*, expected a folder with"):
        checkpoint(tmp_path).answer(str(folder))


def test_the_list_outlives_the_checkpoint_that_the_engine_was_started_with(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    start = checkpoint(tmp_path)
    first = start.answer(None)
    (tmp_path / "model.safetensors").unlink()
    assert start.answer(None) == first


def test_the_route_needs_the_key_of_an_update(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    app = FastAPI()

    @app.post("/update_weights_from_disk")
    def update() -> None: ...

    update._auth_level = "admin"
    add_route(app, lambda: checkpoint(tmp_path))
    (route,) = [route for route in app.routes if getattr(route, "path", None) == PATH]
    assert route.endpoint._auth_level == "admin"
    http = TestClient(app)
    assert http.get(PATH).json()["tensors"] == SHAPES
    assert http.get(PATH, params={"model_path": str(tmp_path)}).json()["tensors"] == SHAPES
    refused = http.get(PATH, params={"model_path": str(tmp_path / "missing")})
    assert (refused.status_code, "expected a folder" in refused.json()["error"]) == (400, True)
