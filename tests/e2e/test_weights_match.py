"""What an engine serves as version v is what the trainer checkpointed as version v.

While a run learns, its engines are asked for greedy tokens behind the run's back; an answer counts
when one single version made all of its tokens. The trainer's own checkpoint of that version, loaded
with transformers, must say the same.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.rollouts.tokenizer import PromptTokenizer
from tests.e2e.harness import ROOT, MusterRun, muster_run

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.slow]

_FLAGS = (
    *("--orchestrator.max-steps", "8", "--wandb.mode", "disabled"),
    *("--trainer.checkpoint.interval-steps", "1", "--trainer.checkpoint.keep", "100"),
    # Far apart: an answer of the wrong version must not be right by chance.
    *("--trainer.optimizer.learning-rate", "3e-3"),
)
_STARTUP_S = 240.0
_END_S = 240.0
_NUM_TOKENS = 24
_NUM_VERSIONS = 3
_PROMPTS = ("abcdefg", "muster", "zyxwv", "weights")
# Run apart: torch stays out of the process that waits for the run.
_GREEDY = """
import json, sys, torch, transformers
path, prompts, num_tokens = json.load(sys.stdin)
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
rows = []
for prompt in prompts:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(num_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    rows.append(ids[0, len(prompt):].tolist())
print(json.dumps(rows))
"""


@dataclass(frozen=True)
class Served:
    """Greedy tokens of one engine for all prompts, made by one version."""

    engine_id: str
    version: int
    rows: tuple[tuple[int, ...], ...]


@pytest.mark.timeout(600)
def test_engines_serve_the_checkpointed_weights(tmp_path: Path) -> None:
    config = ROOT / "configs" / "local" / "quickstart.toml"
    served: dict[tuple[str, int], Served] = {}
    with muster_run(config, tmp_path / "run", _FLAGS) as run:
        run.wait_for("version 1 is in service", lambda: run.version() >= 1, _STARTUP_S)
        model = Path(
            msgspec.json.decode((run.output_dir / "plan/engine.json").read_bytes())["model"]["path"]
        )
        tokenizer = PromptTokenizer(model)
        prompts = [tokenizer.encode_prompt(text) for text in _PROMPTS]
        engines = tuple(run.urls())

        def has_enough() -> bool:
            for engine_id in engines:
                answer = _ask(run, engine_id, prompts)
                if answer is not None:
                    served.setdefault((engine_id, answer.version), answer)
            return all(
                sum(name == engine_id for name, _ in served) >= _NUM_VERSIONS
                for engine_id in engines
            )

        run.wait_for("each engine was asked at several versions", has_enough, _END_S)
        assert run.finish(_END_S) == 0, run.report()
        assert run.tracebacks() == {}
    said = {
        version: _greedy(run.output_dir / "checkpoints" / f"v{version:06d}", prompts)
        for version in sorted({version for _, version in served})
    }
    assert len(set(map(str, said.values()))) > 1, "versions cannot be told apart"
    for answer in served.values():
        assert [list(row) for row in answer.rows] == said[answer.version], answer


def _ask(run: MusterRun, engine_id: str, prompts: list[list[int]]) -> Served | None:
    """Greedy tokens for all prompts; None when more than one version made them, or none did."""
    rows: list[tuple[int, ...]] = []
    versions: set[str] = set()
    for prompt in prompts:
        answer = run.post(
            f"{run.urls()[engine_id]}/inference/v1/generate",
            {
                "token_ids": prompt,
                "sampling_params": {
                    "max_tokens": _NUM_TOKENS,
                    "temperature": 0.0,
                    "ignore_eos": True,
                },
            },
        )
        if answer.status_code == 503:  # paused or closed at this moment
            return None
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        rows.append(tuple(choice["token_ids"]))
        versions |= {span["version"] for span in choice["weight_versions"]}
    if len(versions) != 1:
        return None
    return Served(engine_id, int(versions.pop()), tuple(rows))


def _greedy(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of a transformers model."""
    answer = subprocess.run(
        [sys.executable, "-c", _GREEDY],
        input=msgspec.json.encode([str(path), prompts, _NUM_TOKENS]),
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": ""},
    )
    rows: list[list[int]] = msgspec.json.decode(answer.stdout)
    return rows
