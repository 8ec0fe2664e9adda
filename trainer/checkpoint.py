"""Checkpoints: complete or absent, never half.

    <output_dir>/checkpoints/v000012/
        model.safetensors.*, config.json, tokenizer   what `from_pretrained` and engines load
        rank0.pt, rank1.pt, ...                       master weights and optimizer, a rank's shard
        checkpoint.json                               Manifest: run, version, hash of every file

Everything is written to a hidden directory beside it and renamed at the end; a directory counts
only when its manifest is there and every file has the size and hash that it says. The model's
tensors are gathered and written a few layers at a time. Resuming is exact, with as many ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn

from trainer.learner import Learner
from trainer.model import local_shard, wire_layers
from trainer.world import World

MANIFEST = "checkpoint.json"
_NAME = re.compile(r"v(\d{6,})")
_MAX_FILE_BYTES = 1 << 30
_HASH_CHUNK_BYTES = 1 << 22
# Of the model directory that was loaded, everything small that describes model or tokenizer.
_COPIED_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".tiktoken"}


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is. Written last."""

    run_id: str
    version: int
    num_ranks: int
    wire_dtype: str
    files: dict[str, FileEntry]


class CheckpointError(RuntimeError):
    """A checkpoint is there and cannot be used."""


class Checkpoints:
    """The checkpoints of one output directory. Collective: all ranks call the same methods."""

    def __init__(self, root: Path, world: World, *, model_path: Path, keep: int) -> None:
        self.root = root
        self._world = world
        self._model_path = model_path
        self._keep = keep

    def save(self, learner: Learner, *, run_id: str, dtype: torch.dtype) -> Path:
        """Write the learner's version. Returns the final directory; done already: does nothing."""
        final = self.root / f"v{learner.version:06d}"
        manifest = read_manifest(final, check_hashes=True) if self._world.is_first else None
        is_there = manifest is not None and manifest.version == learner.version
        if self._world.share_int(int(is_there)):
            return final
        partial = self.root / f".{final.name}.partial"
        if self._world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._copy_description(partial)
        self._world.barrier()
        self._save_model(partial, learner.model, dtype)
        torch.save(_rank_state(learner), partial / f"rank{self._world.rank}.pt")
        self._world.barrier()
        if self._world.is_first:
            manifest = Manifest(
                run_id=run_id,
                version=learner.version,
                num_ranks=self._world.size,
                wire_dtype=str(dtype).removeprefix("torch."),
                files={path.name: _entry(path) for path in sorted(partial.iterdir())},
            )
            _write_synced(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
            shutil.rmtree(final, ignore_errors=True)  # incomplete, or it would have been kept
            partial.rename(final)
            _sync_directory(self.root)
            self._remove_old()
        self._world.barrier()
        return final

    def restore(self, learner: Learner) -> int | None:
        """Load the newest complete checkpoint into the learner; its version, or None.

        Raises CheckpointError when it was written by another number of ranks.
        """
        found = newest(self.root) if self._world.is_first else None
        version = self._world.share_int(-1 if found is None else found[1].version)
        if version < 0:
            return None
        num_ranks = self._world.share_int(found[1].num_ranks if found else 0)
        if num_ranks != self._world.size:
            raise CheckpointError(
                f"checkpoint v{version} in {self.root} was written by {num_ranks} ranks, "
                f"this trainer has {self._world.size}: set trainer.num_ranks = {num_ranks}"
            )
        path = self.root / f"v{version:06d}" / f"rank{self._world.rank}.pt"
        state = torch.load(path, map_location=self._world.device, weights_only=True)
        _load_rank_state(learner, state)
        learner.version = version
        return version

    def _copy_description(self, target: Path) -> None:
        for path in sorted(self._model_path.iterdir()):
            is_index = path.name.endswith(".index.json")
            if path.suffix in _COPIED_SUFFIXES and not is_index and path.name != MANIFEST:
                shutil.copyfile(path, target / path.name)

    def _save_model(self, target: Path, model: nn.Module, dtype: torch.dtype) -> None:
        """Gather on all ranks, write on rank 0, one file in memory at a time."""
        files: list[list[str]] = []
        num_bytes = 0
        for tensors in _files(wire_layers(model, dtype)):
            if not self._world.is_first:
                continue
            path = target / f"model-{len(files) + 1:05d}.safetensors"
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in tensors},
                path,
                metadata={"format": "pt"},
            )
            files.append([name for name, _ in tensors])
            num_bytes += sum(tensor.nbytes for _, tensor in tensors)
        if not self._world.is_first:
            return
        count = len(files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        for number, name in enumerate(names):
            (target / f"model-{number + 1:05d}.safetensors").rename(target / name)
        if count > 1:
            weight_map = {param: names[i] for i, params in enumerate(files) for param in params}
            index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
            (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        _write_dtype(target / "config.json", dtype)

    def _remove_old(self) -> None:
        complete = [path for path, _ in _complete(self.root, check_hashes=False)]
        for path in complete[self._keep :]:
            shutil.rmtree(path)
        for path in self.root.glob(".*.partial"):
            shutil.rmtree(path, ignore_errors=True)


def newest(root: Path) -> tuple[Path, Manifest] | None:
    """The complete checkpoint of the highest version; incomplete ones are passed over."""
    return next(iter(_complete(root, check_hashes=True)), None)


def read_manifest(path: Path, *, check_hashes: bool = False) -> Manifest | None:
    """The manifest of a complete checkpoint directory, else None."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        for name, entry in manifest.files.items():
            if (path / name).stat().st_size != entry.num_bytes:
                return None
            if check_hashes and _entry(path / name) != entry:
                return None
    except (OSError, msgspec.MsgspecError):
        return None
    return manifest


def _complete(root: Path, *, check_hashes: bool) -> Iterator[tuple[Path, Manifest]]:
    """Complete checkpoints, newest first."""
    paths = root.iterdir() if root.is_dir() else iter(())
    found = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name))]
    for version, path in sorted(found, reverse=True):
        manifest = read_manifest(path, check_hashes=check_hashes)
        if manifest is not None and manifest.version == version:
            yield path, manifest


def _files(
    layers: Iterator[list[tuple[str, torch.Tensor]]],
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Layers joined to files of about a gigabyte."""
    tensors: list[tuple[str, torch.Tensor]] = []
    for layer in layers:
        tensors.extend(layer)
        if sum(tensor.nbytes for _, tensor in tensors) >= _MAX_FILE_BYTES:
            yield tensors
            tensors = []
    if tensors:
        yield tensors


def _rank_state(learner: Learner) -> dict[str, dict[str, object]]:
    """This rank's shards by parameter name: plain tensors and numbers only."""
    optimizer_state = learner.optimizer.state
    return {
        name: {
            "param": local_shard(param),
            **{
                key: local_shard(value) if isinstance(value, torch.Tensor) else value
                for key, value in optimizer_state.get(param, {}).items()
            },
        }
        for name, param in learner.model.named_parameters()
    }


def _load_rank_state(learner: Learner, state: dict[str, dict[str, torch.Tensor]]) -> None:
    names = {name for name, _ in learner.model.named_parameters()}
    if names != set(state):
        raise CheckpointError(f"checkpoint has other parameters: {sorted(names ^ set(state))[:4]}")
    with torch.no_grad():
        for name, param in learner.model.named_parameters():
            saved = state[name]
            local_shard(param).copy_(saved["param"])
            moments = {key: value for key, value in saved.items() if key != "param"}
            if moments:
                learner.optimizer.state[param] = {
                    key: _like(param, value) if value.ndim else value.cpu()
                    for key, value in moments.items()
                }


def _like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor laid out like `param`, with this rank's part equal to `local`."""
    value = torch.zeros_like(param)
    local_shard(value).copy_(local)
    return value


def _write_dtype(path: Path, dtype: torch.dtype) -> None:
    """Loaders go by the dtype in config.json."""
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")


def _entry(path: Path) -> FileEntry:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
        os.fsync(file.fileno())
    return FileEntry(path.stat().st_size, digest.hexdigest())


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
